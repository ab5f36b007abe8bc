"""Stages of a pipeline change neither loss nor gradients, whatever the schedule.

Errors are relative to the largest element, see `support.relative_error`. The models have dropout
(`gpt`, `bert`) and document masks (`llama`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import Setting, batch_of, evaluate, loss_and_gradients, train
from support import (
    abstract_state,
    assert_close,
    exhaustive,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
)

from megajax.core.config import Config
from megajax.core.counts.schedule import IDLE, schedule_of
from megajax.core.parallel.layout import STAGES, Layout
from megajax.core.train.feed import Batch, place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.microbatches import split, with_weights
from megajax.core.train.objective import Objective
from megajax.core.train.stage_model import StageModel

# Parameters that differ in their last bit change these gradients by up to 1.0e-6 on one device.
LIMIT = 2e-6


def staged(
    name: str, stages: int, chunks: int = 1, data: int = 1, model: int = 1, **fields: Any
) -> Setting:
    """A setting on stages x data x model, with as few layers as these stages have."""
    fields = {'microbatches': max(4, stages), 'num_layers': stages * chunks, **fields}
    return Setting(name, data, model, stages=stages, virtual_stages=chunks, **fields)


SP = {'sequence_parallel': True}


@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(staged('llama', 2, model=2, **SP)),
        exhaustive(staged('both_norms', 2, model=2, data=2, shard='optimizer', **SP)),
        exhaustive(staged('llama', 2, 2, model=2, data=2, **SP)),
        exhaustive(staged('windows', 2, model=2, **SP, num_layers=6)),
        exhaustive(staged('sinks', 2, model=2, **SP, num_layers=4)),
        exhaustive(staged('gpt', 2)),
        exhaustive(staged('gpt', 2, model=2, num_layers=4, recompute='full')),
        exhaustive(staged('gpt', 2, 2, data=2, recompute='selective')),
        exhaustive(staged('gpt', 4, model=2, **SP)),
        exhaustive(staged('gpt', 4, 2, recompute='full')),
        exhaustive(staged('gpt', 4, 2, model=2, **SP)),
        exhaustive(staged('gpt', 2, 2, model=2, data=2, recompute='full', **SP)),
        exhaustive(staged('gpt', 2, 2, model=2, data=2, recompute='selective', **SP)),
        exhaustive(staged('gpt', 4, data=2, schedule='gpipe')),
        exhaustive(staged('gpt', 2, 2, model=2, schedule='gpipe', recompute='full', **SP)),
        exhaustive(staged('gpt', 2, model=2, data=2, schedule='gpipe', recompute='selective')),
        exhaustive(staged('gpt', 2, 3, microbatches=6, overlap='batch_split')),
        exhaustive(staged('llama', 4, data=2, microbatches=6, recompute='full')),
        exhaustive(staged('llama', 4, 2, model=2, schedule='gpipe', **SP)),
        exhaustive(staged('llama', 8, microbatches=8)),
        exhaustive(staged('bert', 2, 2, model=2, data=2, **SP)),
        exhaustive(staged('bert', 4, model=2, recompute='full')),
        exhaustive(staged('bert', 2, data=2, schedule='gpipe', recompute='selective')),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_without_stages(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part, setting)
    )
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


def test_loss_and_gradients_are_those_of_one_device() -> None:
    setting = staged('llama', 2, model=2, **SP)
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.on_one_device._replace(microbatches=1), setting)
    )
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


@pytest.mark.slow
def test_a_stage_keeps_the_residuals_of_windows_in_blocks() -> None:
    setting = staged('sinks', 2, num_layers=4)
    with on_mesh(setting.config):
        params, batch = abstract_state(setting.config).params, batch_of(setting)
        loss_and_gradients = make_loss_and_gradients(setting.config)
        jax.eval_shape(loss_and_gradients, params, batch, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(staged('gpt', 2, 2, data=2, shard='optimizer')),
        # padded shards
        exhaustive(staged('llama', 2, data=3, shard='optimizer', **SP, microbatches=2)),
        exhaustive(staged('llama', 2, data=4, shard='optimizer', replicas=2, microbatches=2)),
        exhaustive(staged('gpt', 4, data=2, shard='optimizer', dtype='bfloat16')),
    ],
    ids=str,
)
def test_zero_changes_nothing_on_stages(setting: Setting) -> None:
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.unsharded, setting)
    )
    assert relative_error(loss, expected_loss) <= LIMIT
    assert_close(gradients, expected, LIMIT)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_in_16_bits_losses_and_gradients_differ_by_rounding_alone(dtype: str) -> None:
    setting = staged('llama', 2, 2, model=2, dtype=dtype, **SP)
    (expected_loss, expected), (loss, gradients) = map(
        loss_and_gradients, (setting.in_one_part, setting)
    )
    assert relative_error(loss, expected_loss) <= 1e-4
    assert_close(gradients, expected, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        staged('gpt', 2, 2, model=2, data=2, shard='optimizer', plain=True, **SP),
        exhaustive(staged('bert', 4, data=2)),
    ],
    ids=str,
)
def test_five_steps_and_an_evaluation_end_as_those_without_stages(setting: Setting) -> None:
    expected, actual = train(setting.in_one_part), train(setting)
    assert relative_error(actual.losses, expected.losses) <= 1e-5
    assert_close(actual.first_moments, expected.first_moments, 1e-5)
    assert_close(actual.params, expected.params, 1e-5)
    assert actual.evaluated == pytest.approx(expected.evaluated, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', [exhaustive('gpt'), 'bert'])
def test_an_evaluation_sums_what_it_sums_without_stages(name: str) -> None:
    setting = staged(name, 4, 2, num_layers=8)
    assert evaluate(setting) == pytest.approx(evaluate(setting.in_one_part), rel=1e-6)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_runs_on_the_same_mesh_are_equal_to_the_bit() -> None:
    setting = staged('gpt', 2, 2, model=2, data=2, **SP)
    first = train(setting)
    train.cache_clear()
    second = train(setting)
    assert first.losses == second.losses
    assert_close(second.params, first.params, 0)


@functools.cache
def interleaved() -> tuple[Config, StageModel]:
    """A pipeline of two stages, each with two chunks of two layers."""
    config = make_config(
        'gpt',
        model={'num_layers': 8},
        mesh={'stages': 2, 'virtual_stages': 2},
        train={'microbatches': 2},
    )
    with on_mesh(config):
        layout = Layout.of(config)

        @jax.jit
        def in_microbatches(batch: Batch) -> Batch:
            weighted = with_weights(batch, config, layout)
            return jax.tree.map(lambda x: split(x, config.train.microbatches, layout), weighted)

        microbatches = in_microbatches(place_batch(make_batch(config)))
        params = random_params(config, std=0.05)
        objective, schedule = Objective.of(config, layout), schedule_of(config)
        return config, StageModel(objective, layout, schedule, params, None, microbatches)


def test_an_idle_stage_gets_the_embedded_tokens_too() -> None:
    """Equal tokens would all choose the same experts, for which every stage would wait."""
    config, model = interleaved()
    with on_mesh(config):
        passes_Z3 = jax.reshard(jnp.array([[0, 0, 0], [IDLE] * 3]), STAGES('Z-'))
        x = jax.jit(lambda passes: model.input(model.zeros('BTD'), jnp.int32(0), passes))(passes_Z3)
        first, idle = np.asarray(x)
    np.testing.assert_array_equal(first, idle)
    assert idle.any()


@pytest.mark.parametrize('chunk', [0, 1])
def test_a_pass_counts_its_layers_from_the_first_one_that_its_stage_has_in_the_chunk(
    chunk: int,
) -> None:
    """The keys of dropout follow from this index."""
    config, model = interleaved()
    with on_mesh(config):
        passes_Z3 = jax.reshard(jnp.array([[0, chunk, 0]] * 2), STAGES('Z-'))
        *_, first = model.given(passes_Z3)
        stored = model.layout.layer_order(config.model.num_layers)
    expected = [stored[4 * stage + 2 * chunk] for stage in range(2)]
    assert np.asarray(first).ravel().tolist() == expected
