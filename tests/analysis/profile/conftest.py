"""A run on a simulated mesh, with a trace of its last two steps."""

from pathlib import Path

import pytest
from support import write_run

import megajax

CONFIG = """
model: {num_layers: 1, hidden_size: 32, num_heads: 2, vocab_size: 300, max_seq_len: 32}
mesh: {data: 2, model: 2, sequence_parallel: true}
train: {steps: 3, batch_size: 4, seq_len: 32, dtype: float32, \
profile: {start: 1, steps: 2}}
"""


@pytest.fixture(scope='session')
def traced_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp('profile'), CONFIG, split='1,0,0')
    config = megajax.load(str(folder / 'small.yaml'), [f'run.dir={folder}/run'])
    return megajax.train(config).folder
