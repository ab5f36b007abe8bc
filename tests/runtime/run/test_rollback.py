"""After a rollback, a run reads as many more batches as it lost."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megajax.core.config import load
from megajax.runtime.data import load_data
from megajax.runtime.run.rollback import Rollbacks

PAIRS = Path(__file__).parents[1] / 'data/oracles/gpt_dataset'


@pytest.mark.parametrize('shift', [0, 5])
def test_a_blend_in_megatron_s_order_has_more_batches_and_the_same_ones_first(shift: int) -> None:
    overrides = [
        f'data.blend={{{PAIRS}/a: 0.7, {PAIRS}/b: 0.3}}',
        'data.order=megatron',
        'data.tokenizer=none',
        'data.split=900,50,50',
        'model.vocab_size=70000',
        'train.seq_len=32',
        'train.steps=3',
        'train.batch_size=4',
        'optim.warmup_steps=0',
        'train.sample_prompts=[]',
    ]
    config = load('tiny', overrides)
    data = load_data(config)
    data = dataclasses.replace(data, train=data.train.going_on(0, shift))
    before, steps = data.train, len(data.train)
    rollbacks = Rollbacks(config, data, **dict[str, Any](report=None, checkpoints=None))
    after = rollbacks._with_more_batches(steps + 2).train
    assert len(after) >= steps + 2
    full = (config.train.steps * config.train.batch_size - shift) // config.train.batch_size
    for step in range(full):
        assert (after[step]['labels'] == before[step]['labels']).all()
