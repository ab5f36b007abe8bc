"""Answers for the pictures of a folder: in order, the same in every batch, and read ahead."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from runtime.generate.test_generate import FakeEngine
from support import exhaustive, on_mesh, random_params, random_state
from vlm import vlm

from megajax.commands import generate as cli_generate
from megajax.core.config import Config, ConfigError
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.generate import (
    Generator,
    PromptReader,
    Request,
    Sampling,
    answer_all,
    check_prompts,
    find_pictures,
)
from megajax.runtime.generate.engine import engine
from megajax.runtime.generate.image_folder import read_ahead

TOKENIZER = byte_tokenizer(('<image>',))
CONFIG = vlm(model={'vocab_size': 258, 'max_seq_len': 48}, vision={'image_token': 257})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / 'pictures'
    folder.mkdir()
    random = np.random.default_rng(0)
    for i in range(5):
        pixels = random.integers(256, size=(4 + 4 * i, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png')
    (folder / 'more').mkdir()
    (folder / '.hidden').write_text('no picture')
    return folder


def answers(config: Config, folder: Path, batch_size: int, temperature: float) -> dict[str, str]:
    request = Request(
        max_tokens=5, sampling=Sampling(temperature=temperature), seed=3, to_eod=False
    )
    with on_mesh(config):
        generator = Generator(config, random_params(config, std=0.3), TOKENIZER)
        reader = PromptReader(config, TOKENIZER)
        documents = check_prompts(reader, 'See <image>:', find_pictures(folder))
        found = answer_all(generator, reader, documents, request, batch_size=batch_size)
        return {picture.name: row.text for picture, row in found}


@pytest.mark.slow
@pytest.mark.parametrize('temperature', [exhaustive(0.0), 0.9])
def test_an_answer_is_the_same_in_every_batch(folder: Path, temperature: float) -> None:
    together = answers(CONFIG, folder, 16, temperature)
    assert list(together) == [f'{i}.png' for i in range(5)]
    assert len(set(together.values())) >= 4  # two pictures may have one answer
    assert answers(CONFIG, folder, 2, temperature) == together


@pytest.mark.slow
def test_batches_of_a_shape_compile_one_function_that_reads_and_one_that_looks(
    folder: Path,
) -> None:
    config = vlm(model={'vocab_size': 258, 'max_seq_len': 47}, vision={'image_token': 257})
    answers(config, folder, 2, 0.0)
    compiled = engine(config)
    assert (compiled.look._cache_size(), compiled.read._cache_size()) == (1, 1)


def test_a_broken_picture_is_told_after_the_answers_of_the_batches_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BlindEngine(FakeEngine):
        def read(self, *arguments: Any, **named: Any) -> Any:
            return super().read(*arguments[:6], None, None, **named)

    class Broken(PromptReader):
        def read(self, document):
            if document.paths[0].stem == '2':
                raise ConfigError('2.png breaks off')
            return super().read(document)

    engine = BlindEngine()
    monkeypatch.setattr('megajax.runtime.generate.generator.engine', lambda _: engine)
    monkeypatch.setattr('megajax.runtime.generate.generator.make_weights', lambda *_: None)
    reader, answered = Broken(CONFIG, TOKENIZER), []
    documents = check_prompts(reader, '<image>', find_pictures(folder))
    with on_mesh(CONFIG):
        generator = Generator(CONFIG, None, TOKENIZER)
        found = answer_all(generator, reader, documents, Request(max_tokens=2), batch_size=2)
        with pytest.raises(ConfigError, match='breaks off'):
            answered.extend(picture.name for picture, _ in found)
    assert answered == ['0.png', '1.png']


@pytest.mark.slow
def test_it_is_the_same_on_another_mesh(folder: Path) -> None:
    mesh = CONFIG.mesh.model_copy(update={'data': 2, 'model': 2})
    other = CONFIG.model_copy(update={'mesh': mesh})
    assert answers(other, folder, 16, 0.0) == answers(CONFIG, folder, 16, 0.0)


def test_the_next_batch_is_read_while_one_is_answered(folder: Path) -> None:
    read = {i: threading.Event() for i in range(5)}

    class Recorded(PromptReader):
        def read(self, document):
            read[int(document.paths[0].stem)].set()
            return super().read(document)

    reader = Recorded(CONFIG, TOKENIZER)
    documents = check_prompts(reader, '<image>', find_pictures(folder))
    batches = read_ahead(reader, documents, 2)
    assert len(next(batches)) == 2
    assert all(read[i].wait(10) for i in (2, 3))
    assert not read[4].is_set()
    assert [len(batch) for batch in batches] == [2, 1]


def test_files_that_are_no_pictures_are_named_before_anything_is_computed(folder: Path) -> None:
    for i in range(7):
        (folder / f'x{i}.txt').write_text('no picture')
    reader = PromptReader(CONFIG, TOKENIZER)
    with pytest.raises(ConfigError) as found:
        check_prompts(reader, '<image>', find_pictures(folder))
    lines = str(found.value).splitlines()
    assert len(lines) == 6
    assert 'x0.txt: is not an image' in lines[0]
    assert lines[-1] == 'and 2 more of 12 files'


@pytest.mark.parametrize(
    ('letters', 'message'),
    [
        (45, r'0.png: the prompt has 48 tokens with its images, .*model.max_seq_len=48'),
        (80, r'4.png: the prompt has 85 tokens with its images'),
    ],
)
def test_a_prompt_without_room_is_refused(folder: Path, letters: int, message: str) -> None:
    reader = PromptReader(CONFIG, TOKENIZER)
    with pytest.raises(ConfigError, match=message):
        check_prompts(reader, 'x' * letters + '<image>', find_pictures(folder))


@pytest.fixture(scope='module', name='run')
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('run')
    with (
        on_mesh(CONFIG),
        Checkpoints(folder / 'checkpoints', CONFIG, tokenizer=TOKENIZER) as checkpoints,
    ):
        checkpoints.save(random_state(CONFIG), 1)
    return folder


@pytest.mark.slow
def test_the_command_writes_a_line_for_each_picture(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli_generate.generate(run, images=folder, max_tokens=4)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line['image'] for line in lines] == [f'{i}.png' for i in range(5)]
    assert {tuple(line) for line in lines} == {('image', 'text', 'tokens', 'end')}
    cli_generate.generate(run, image=[folder / '0.png'], max_tokens=4)
    assert capsys.readouterr().out == f'<image>{lines[0]["text"]}\n'


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'images': Path('gone')}, 'gone: no such folder'),
        ({'images': Path(), 'image': [Path('a.png')]}, 'remove --image and --prompts'),
        ({'images': Path(), 'prompt': ['What?']}, 'single --prompt that contains <image> once'),
        (
            {'images': Path(), 'prompt': ['<image>', '<image>']},
            'single --prompt that contains <image> once',
        ),
        ({'prompt': ['What?', 'See <image>.']}, 'prompt 2 contains <image>, which stands for an'),
    ],
)
def test_a_wrong_command_is_refused(run: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli_generate.generate(run, **settings)


@pytest.mark.slow
def test_more_pictures_than_a_row_holds_are_refused(run: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r'has 3 images, .* have 2; use vision.images='):
        cli_generate.generate(run, image=[folder / '0.png'] * 3)
    cli_generate.generate(run, ['vision.images=3'], image=[folder / '0.png'] * 3, max_tokens=1)


def test_an_empty_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ConfigError, match='contains no images'):
        cli_generate.generate(run, images=tmp_path / 'empty')
