"""An evaluation runs the microbatches of a training step, and sums the same over all of them."""

import functools

import jax
import numpy as np
import pytest
from jax.stages import Compiled
from support import abstract_state, make_batch, make_config, on_mesh, random_params

from megajax.core.config import Config
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import Batch, place_batch


def config_of(microbatches: int) -> Config:
    return make_config(
        'gpt',
        2,
        1,
        model={'vocab_size': 64},
        train={'batch_size': 32, 'microbatches': microbatches},
    )


@functools.cache
def compiled(microbatches: int, rows: int) -> Compiled:
    config = config_of(microbatches)
    with on_mesh(config):
        return make_eval_step(config).lower(abstract_state(config).params, batch(rows)).compile()


def batch(rows: int) -> Batch:
    """The first rows of a batch, on the current mesh."""
    whole = make_batch(config_of(1))
    whole['label_bytes'] = whole['labels'] % 5
    return place_batch({name: x[:rows] for name, x in whole.items()})


def test_more_microbatches_need_less_memory() -> None:
    def temporaries(microbatches: int) -> int:
        analysis = compiled(microbatches, 32).memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 8


@pytest.mark.parametrize('rows', [32, 12])
def test_the_sums_are_those_of_one_microbatch(rows: int) -> None:
    """Also of a batch of 6 sequences per shard, which 16 microbatches do not divide."""

    def sums(microbatches: int) -> dict[str, float]:
        config = config_of(microbatches)
        with on_mesh(config):
            given = batch(rows)
            found = compiled(microbatches, rows)(random_params(config, std=0.05), given)
        assert found['bytes'] == np.asarray(given['label_bytes']).sum()
        assert found['tokens'] == np.asarray(given['loss_mask']).sum()
        return jax.tree.map(float, found)

    assert sums(16) == pytest.approx(sums(1), rel=1e-6)


def test_the_sums_of_a_mask_in_16_bits_are_in_fp32() -> None:
    config = config_of(1)
    with on_mesh(config):
        batch = make_batch(config)
        batch['loss_mask'] = batch['loss_mask'].astype(np.float16)
        params = abstract_state(config).params
        sums = jax.eval_shape(make_eval_step(config), params, place_batch(batch))
    assert {x.dtype for x in sums.values()} == {np.dtype(np.float32)}
