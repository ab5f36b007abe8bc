"""A run on pictures resumes where it was: to the bit on its mesh, with the same rows on another."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from runs import finish, start
from support import by_name, exhaustive, more, on_mesh

from megajax.core.config import Config, ConfigError, load
from megajax.runtime.checkpoint.compare import check_same_data
from megajax.runtime.checkpoint.open import restore_params
from megajax.runtime.checkpoint.record import make_record
from megajax.runtime.data import load_data
from megajax.runtime.run.resumed_data import resumed_data
from megajax.runtime.run.run import run

SMALL = [
    'model.num_layers=1',
    'vision.num_layers=1',
    'vision.deepstack=[0]',
    'model.ffn_size=64',
    'train.batch_size=8',
    'train.eval_every=100',
    'train.eval_batches=1',
    'train.log_every=1',
    'optim.schedule=constant',
    'optim.warmup_steps=0',
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / 'corpus'
    folder.mkdir()
    random = np.random.default_rng(0)
    lines = []
    for i in range(30):
        size = *random.integers(6, 60, size=2), 3
        Image.fromarray(random.integers(256, size=size, dtype=np.uint8)).save(folder / f'{i}.png')
        text = f'{i}: <image>' if i % 3 else f'no picture {i}'
        lines.append(json.dumps({'text': text, 'images': [f'{i}.png'] if i % 3 else []}))
    (folder / 'data.jsonl').write_text('\n'.join(lines))
    return folder


def train(folder: Path, steps: int, *overrides: str) -> Config:
    config = load('tiny_vlm', [*SMALL, f'train.steps={steps}', f'run.dir={folder}', *overrides])
    assert run(config, name='test').step == steps
    return config


def losses(folder: Path) -> list[float]:
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    return [json.loads(line)['loss'] for line in lines if 'loss' in json.loads(line)]


def parameters(folder: Path, config: Config) -> dict[str, Any]:
    with on_mesh(config):
        params = restore_params(folder / 'checkpoints/6', config)
        return {name: np.asarray(x) for name, x in by_name(params).items()}


@pytest.mark.parametrize('name', [more('lines'), exhaustive('words')])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, corpus: Path, name: str) -> None:
    data = f'data.corpus={corpus if name == "lines" else "words"}'
    config = train(tmp_path / 'straight', 6, data)
    train(tmp_path / 'run', 3, data)
    train(tmp_path / 'run', 6, data, 'run.resume=must')
    assert losses(tmp_path / 'run') == losses(tmp_path / 'straight')
    expected = parameters(tmp_path / 'straight', config)
    for parameter, x in parameters(tmp_path / 'run', config).items():
        np.testing.assert_array_equal(x, expected[parameter], parameter)


@pytest.mark.parametrize('name', [more('words'), exhaustive('lines')])
def test_on_another_mesh_the_same_pictures_follow(tmp_path: Path, corpus: Path, name: str) -> None:
    data = f'data.corpus={corpus if name == "lines" else "words"}'
    train(tmp_path / 'straight', 6, data)
    train(tmp_path / 'run', 3, data)
    train(tmp_path / 'run', 6, data, 'mesh.data=1', 'mesh.model=4', 'mesh.sequence_parallel=true')
    np.testing.assert_allclose(losses(tmp_path / 'run'), losses(tmp_path / 'straight'), rtol=1e-5)


def test_a_picture_that_was_replaced_leaves_the_order_of_samples_as_it_was(
    tmp_path: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load('tiny_vlm', [*SMALL, f'data.corpus={corpus}', f'run.dir={tmp_path / "run"}'])
    pictures = [corpus / f'{i}.png' for i in (1, 2)]
    whole = [picture.read_bytes() for picture in pictures]
    pictures[0].write_bytes(whole[0][:60])
    data = load_data(config)
    there = make_record(config, 3, data=data.fingerprints)
    with pytest.raises(
        ConfigError, match=r'1.png: cannot be read .* run that resumes .*run.allow_ch'
    ):
        list(map(data.train.__getitem__, range(9)))
    pictures[0].write_bytes(whole[0])
    again = load_data(config)
    here = make_record(config, 3, data=again.fingerprints)
    with pytest.raises(ConfigError, match='different data of the same name'):
        check_same_data(tmp_path, there, here)
    resumed_data(again, config, there, batches=3)
    assert not caplog.text
    (corpus / 'data.jsonl').write_text((corpus / 'data.jsonl').read_text().replace('no', 'a'))
    resumed_data(load_data(config), config, there, batches=3)
    assert 'resume     the corpus: the order of samples has changed' in caplog.text


CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 258, max_seq_len: 48, \
norm: rmsnorm, position: rope, bias: false}
vision: {num_layers: 1, hidden_size: 16, num_heads: 2, patch_size: 4, positions: 4, \
max_patches: 16, image_token: 257}
mesh: {data: 2}
train: {steps: 12, batch_size: 4, seq_len: 48, dtype: float32, log_every: 1}
data: {corpus: corpus, tokenizer: bytes, split: '100,0,0'}
"""


# All pictures break off before the rows of the eleventh step are read.
BREAK = """
import os
from pathlib import Path
from megajax.runtime.data import Batches
def rows(self, step, start, stop, rows=Batches.rows):
    if step == 10:
        for picture in Path('corpus').glob('*.png'):
            cut = picture.with_suffix(f'.{os.getpid()}')
            cut.write_bytes(picture.read_bytes()[:60])
            cut.replace(picture)  # the other process reads it now and cuts it too
    return rows(self, step, start, stop)
Batches.rows = rows
"""


@pytest.mark.faults
@pytest.mark.exhaustive
def test_several_processes_read_their_own_rows_and_refuse_a_broken_picture(
    tmp_path: Path, corpus: Path
) -> None:
    (tmp_path / 'small.yaml').write_text(CONFIG)
    code, said = finish(start(tmp_path, name='alone'))
    assert code == 0, said
    code, said = finish(start(tmp_path, processes=2, name='apart', fault=BREAK))
    assert code == 2, said
    assert re.search(r'corpus/data.jsonl:\d+: \S+.png: cannot be read', said)
    apart = losses(tmp_path / 'apart')
    assert len(apart) >= 3
    np.testing.assert_allclose(apart, losses(tmp_path / 'alone')[: len(apart)], rtol=1e-6)
