"""`train`, `eval` and `generate` read odd pictures as a person does, and refuse bad ones by file
and line.
"""

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from support import exhaustive, megajax, slow
from typer.testing import CliRunner

from megajax.commands.generate_images import check_images
from megajax.commands.generate_output import note_letters
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.runtime.data.text.tokenizer import byte_tokenizer

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 258, max_seq_len: 64, \
norm: rmsnorm, position: mrope, mrope_section: [2, 1, 1], bias: false}
vision: {num_layers: 1, hidden_size: 16, num_heads: 2, patch_size: 4, positions: 4, \
max_patches: 16, image_token: 257}
mesh: {data: 1}
train: {steps: 2, batch_size: 2, seq_len: 48, dtype: float32, eval_every: 2, log_every: 1}
data: {tokenizer: bytes, split: '100,0,0'}
"""
LOOP = '{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}'
PERPLEXITY = '--task', 'perplexity'
Make = Callable[[Path], None]


def red(size: tuple[int, int] = (12, 8)) -> Image.Image:
    return Image.new('RGB', size, (200, 30, 30))


def palette(path: Path) -> None:
    red().quantize(2).save(path.with_suffix('.png'))


def cmyk(path: Path) -> None:
    red().convert('CMYK').save(path.with_suffix('.jpg'))


def of_16_bits(path: Path) -> None:
    Image.fromarray(np.full((8, 12), 40000, np.uint16)).save(path.with_suffix('.png'))


def animated(path: Path) -> None:
    frames = [Image.new('RGB', (12, 8), 'blue')]
    red().save(path.with_suffix('.gif'), save_all=True, append_images=frames)


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    red().save(path.with_suffix('.jpg'), exif=exif)


def one_pixel(path: Path) -> None:
    red((1, 1)).save(path.with_suffix('.png'))


ODD = (palette, cmyk, of_16_bits, animated, rotated, one_pixel)


def no_picture(path: Path) -> None:
    path.write_text('no picture')


def truncated(path: Path) -> None:
    random = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(random).save(path)
    path.write_bytes(path.read_bytes()[:2000])


def bomb(path: Path) -> None:
    """Some bytes that promise 100 megapixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack('>I', len(content))
            + kind
            + content
            + struct.pack('>I', zlib.crc32(kind + content))
        )

    header = struct.pack('>IIBBBBB', 10_000, 10_000, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(30_001))
    chunks = chunk(b'IHDR', header), chunk(b'IDAT', pixels), chunk(b'IEND', b'')
    path.write_bytes(b'\x89PNG\r\n\x1a\n' + b''.join(chunks))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def thin(path: Path) -> None:
    red((1, 300)).save(path)


BAD: list[tuple[Make, str]] = [
    (no_picture, 'is not an image in one of the formats'),
    (truncated, 'cannot be read'),
    (bomb, 'has 10000 x 10000 pixels, more than 67,108,864'),
    (pipe, 'is not a file'),
    (thin, 'one side may be at most 200 times the other'),
]
bad_pictures = pytest.mark.parametrize(
    ('make', 'message'), BAD, ids=lambda x: getattr(x, '__name__', '')
)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def refusal(*arguments: object) -> str:
    done = call(*arguments)
    assert isinstance(done.exception, ConfigError), (done.exception, done.output)
    assert done.exception.exit_code == 2
    return str(done.exception)


def line(*names: str, text: str = '') -> str:
    return json.dumps({'text': (text or '<image>' * len(names) + '.'), 'images': names}) + '\n'


@pytest.fixture(scope='module')
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with odd pictures, lines that name them, and a run on these."""
    folder = tmp_path_factory.mktemp('pictures')
    (folder / 'odd').mkdir()
    for make in ODD:
        make(folder / 'odd' / make.__name__)
    names = sorted(path.name for path in (folder / 'odd').iterdir())
    assert len(names) == len(ODD)
    (folder / 'odd/data.jsonl').write_text(''.join(map(line, names)) + line(text='Plain.'))
    (folder / 'small.yaml').write_text(CONFIG)
    done = call(
        'train',
        folder / 'small.yaml',
        f'data.corpus={folder}/odd',
        f'run.dir={folder}/run',
    )
    assert done.exit_code == 0, (done.exception, done.output)
    assert '7 documents with 6 images' in done.output
    return folder


def test_a_run_reads_odd_pictures_as_others(trained: Path) -> None:
    lines = (trained / 'run/metrics.jsonl').read_text().splitlines()
    losses = [json.loads(line)['loss'] for line in lines if 'loss' in line]
    assert len(losses) == 2
    assert np.isfinite(losses).all()


@pytest.mark.parametrize('mesh', ['mesh.data=2', exhaustive('mesh.model=2')])
def test_eval_counts_odd_pictures(trained: Path, mesh: str) -> None:
    out = trained / f'{mesh}.json'
    done = call('eval', trained / 'run', trained / 'odd', mesh, *PERPLEXITY, '--json', out)
    assert done.exit_code == 0, (done.exception, done.output)
    found = json.loads(out.read_text())['results']['perplexity']
    assert (found['documents'], found['images']) == (7, 6)
    assert np.isfinite(found['loss'])


def test_generate_answers_each_odd_picture(trained: Path, tmp_path: Path) -> None:
    for make in ODD:
        make(tmp_path / make.__name__)
    done = call('generate', trained / 'run', '--images', tmp_path, '--max-tokens', 2)
    assert done.exit_code == 0, (done.exception, done.output)
    names = [json.loads(line)['image'] for line in done.stdout.splitlines()]
    assert names == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ('make', 'message'),
    [slow(*bad) if truncated in bad else bad for bad in BAD],
    ids=lambda x: getattr(x, '__name__', ''),
)
def test_train_and_eval_refuse_a_bad_picture_by_file_and_line(
    trained: Path, tmp_path: Path, make: Make, message: str
) -> None:
    make(tmp_path / 'bad.png')
    red().save(tmp_path / 'good.png')
    data = tmp_path / 'data.jsonl'
    data.write_text(line('good.png') + line('bad.png') + line('good.png'))
    for said in (
        refusal('train', trained / 'small.yaml', f'data.corpus={data}', f'run.dir={tmp_path}/run'),
        refusal('eval', trained / 'run', data, *PERPLEXITY),
    ):
        assert said.startswith(f'{data}:2: {tmp_path}/bad.png: ')
        assert message in said


@bad_pictures
def test_generate_refuses_a_bad_picture_by_file(
    trained: Path, tmp_path: Path, make: Make, message: str
) -> None:
    make(tmp_path / 'bad.png')
    red().save(tmp_path / 'good.png')
    for arguments in (('--images', tmp_path), ('--image', tmp_path / 'bad.png')):
        said = refusal('generate', trained / 'run', *arguments)
        assert said.startswith(f'{tmp_path}/bad.png: ')
        assert message in said


@pytest.mark.parametrize(
    ('written', 'message'),
    [
        (line(text='<image>'), 'has 1 image placeholders, but 0 files in "images"'),
        (line('gone.png'), 'gone.png: is not a file'),
        (line('../good.png'), '../good.png: is outside'),
        (line('link.png'), 'link.png: is outside'),
        (line('good.png', 'good.png'), 'has 2 images, and a sequence can have 1'),
        ('{"text": \n', 'is not JSON'),
    ],
)
def test_train_and_eval_refuse_a_bad_line_by_file_and_number(
    trained: Path, tmp_path: Path, written: str, message: str
) -> None:
    folder = tmp_path / 'corpus'
    folder.mkdir()
    for path in (tmp_path / 'good.png', folder / 'good.png'):
        red().save(path)
    (folder / 'link.png').symlink_to(tmp_path / 'good.png')
    data = folder / 'data.jsonl'
    data.write_text(line('good.png') + '\n' + written)
    for said in (
        refusal(
            'train', trained / 'small.yaml', f'data.corpus={folder}', f'run.dir={tmp_path}/run'
        ),
        refusal('eval', trained / 'run', folder, *PERPLEXITY),
    ):
        assert said.startswith(f'{data}:3: ')
        assert message in said


def test_train_and_eval_refuse_a_template_that_loops(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('megajax.runtime.data.image_text.chat.MAX_SECONDS', 0.1)
    (tmp_path / 'chat.jinja').write_text(LOOP)
    data = tmp_path / 'data.jsonl'
    turns = [{'role': 'user', 'content': 'Hi.'}, {'role': 'assistant', 'content': 'Hi.'}]
    data.write_text(json.dumps({'messages': turns}))
    template = f'data.chat_template={tmp_path}/chat.jinja'
    for said in (
        refusal(
            'train',
            trained / 'small.yaml',
            f'data.corpus={data}',
            template,
            f'run.dir={tmp_path}/run',
        ),
        refusal('eval', trained / 'run', data, template, *PERPLEXITY),
    ):
        assert said.startswith(f'{data}:1: ')
        assert 'takes more than 0.1 s, in line 1' in said


@pytest.mark.slow
def test_every_mistake_in_the_images_of_a_prompt_is_named_before_jax_is_imported(
    tmp_path: Path,
) -> None:
    there, gone = tmp_path / 'a.png', tmp_path / 'gone.png'
    red().save(there)
    with pytest.raises(ConfigError) as caught:
        check_images(None, [there, gone], None, ['what is <image>'])
    assert str(caught.value).splitlines() == [
        f'{gone}: no such file',
        'the prompt contains <image> 1 times, but --image is given 2 times: write <image> once '
        "for each, for example '<image><image>?'",
    ]
    check_images(None, [there], None, ['what is <image>'])
    check_images(None, [there], None, [])


def test_a_picture_that_breaks_off_ends_the_command_with_2(trained: Path, tmp_path: Path) -> None:
    truncated(tmp_path / 'bad.png')
    data = tmp_path / 'data.jsonl'
    data.write_text(line('bad.png') * 4)
    keys = f'data.corpus={data}', f'run.dir={tmp_path}/run'
    done = megajax('train', trained / 'small.yaml', *keys)
    assert done.returncode == 2, done.stderr
    assert f'error: {data}:' in done.stderr
    assert 'bad.png: cannot be read' in done.stderr
    assert 'Traceback' not in done.stderr


def test_a_prompt_that_spells_a_template_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_tokenizer(('<image>', '<|im_start|>', '<|im_end|>'))
    note_letters(['<image>What?', 'And <im_end>?'], tokenizer)
    assert not capsys.readouterr().err
    note_letters(['<|im_start|>user', '<image><|im_start|>What?<|im_end|>'], tokenizer)
    said = (
        'note: prompts spell special tokens (<|im_end|>, <|im_start|>), which are read as letters'
    )
    assert capsys.readouterr().err.startswith(said)
