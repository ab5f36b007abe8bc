"""Whole steps with Muon are those of optax on one device, on every mesh and after a resume."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax_muon import joined, optimizer_of_optax, split
from steps import Setting, batch_of
from support import (
    assert_close,
    exhaustive,
    gather,
    in_layer_order,
    on_mesh,
    random_params,
    random_state,
    slow,
)

from megajax.analysis.plan.layouts import changed
from megajax.core.config import Config
from megajax.core.train.gradients import make_gradients
from megajax.core.train.routing import after_step, init_load
from megajax.core.train.step import TrainState, make_train_step
from megajax.runtime.checkpoint.checkpoints import Checkpoints

STEPS = 5
LIMIT = 1e-5
Arrays = dict[str, np.ndarray]
BASE = Setting('llama', 1, 1, rows=48, plain=True)
# Two devices divide neither 60 nor, with one layer, the number of keys and values.
ZERO_3 = BASE._replace(data=2, model=2, shard='weights', num_layers=1, hidden_size=60)
PADDED = BASE._replace(hidden_size=60)
GRID = BASE._replace(sequence_parallel=True)
EXPERTS = PADDED._replace(name='experts')
SETTINGS = [
    slow(ZERO_3),
    exhaustive(EXPERTS._replace(data=4, experts=2, model=2, shard='weights')),
    *(exhaustive(PADDED._replace(data=8, shard=shard)) for shard in ('none', 'optimizer')),
    *(exhaustive(PADDED._replace(data=8, shard=shard)) for shard in ('gradients', 'weights')),
    exhaustive(PADDED._replace(data=8, replicas=4, shard='weights')),
    exhaustive(PADDED._replace(data=4, model=2, replicas=2, shard='gradients')),
    exhaustive(PADDED._replace(data=4, model=2, shard='optimizer', sequence_parallel=True)),
    exhaustive(PADDED._replace(data=2, model=4, shard='weights')),
    exhaustive(PADDED._replace(model=8, sequence_parallel=True)),
    exhaustive(GRID._replace(data=2, model_rows=2, model=2, shard='weights')),
    exhaustive(GRID._replace(data=4, model_rows=2, shard='optimizer')),
    exhaustive(GRID._replace(model_rows=8)),
    exhaustive(PADDED._replace(context=8)),
    exhaustive(PADDED._replace(data=2, context=2, model=2, shard='gradients')),
    exhaustive(PADDED._replace(data=2, stages=2, model=2, shard='optimizer', microbatches=2)),
    exhaustive(PADDED._replace(data=2, stages=4, num_layers=4, microbatches=4)),
    exhaustive(PADDED._replace(stages=2, context=2, model=2, microbatches=2)),
    exhaustive(EXPERTS._replace(data=8, experts=8, shard='optimizer')),
    exhaustive(EXPERTS._replace(data=8, experts=4, shard='weights')),
    exhaustive(EXPERTS._replace(data=4, experts=4, context=2, shard='gradients')),
    exhaustive(EXPERTS._replace(data=4, experts=2, stages=2, shard='optimizer', microbatches=2)),
]


def config_of(setting: Setting) -> Config:
    return changed(setting.config, optim__kind='muon', optim__weight_decay=0.1)


@functools.cache
def step_of(setting: Setting) -> Callable[..., Any]:
    return make_train_step(config_of(setting))


def train(setting: Setting, state: TrainState, start: int = 0) -> tuple[TrainState, list[Arrays]]:
    """The state after STEPS steps, of which `start` are taken, and all parameters on the way."""
    config, found = config_of(setting), []
    for seed in range(start, STEPS):
        state, _ = step_of(setting)(state, batch_of(setting, seed))
        found.append(in_layer_order(gather(state.params), config))
    return state, found


@functools.cache
def trained(setting: Setting) -> list[Arrays]:
    with on_mesh(config_of(setting)):
        return train(setting, random_state(config_of(setting)))[1]


@functools.cache
def trained_by_optax(setting: Setting) -> list[Arrays]:
    """The parameters after each step, with the gradients of one device."""
    config, found = config_of(setting), []
    with on_mesh(config):
        gradients_of = jax.jit(make_gradients(config))
        params, load = random_params(config, std=0.05), init_load(config)
        arrays, optimizer = gather(params), optimizer_of_optax(config)
        matrices = split(arrays, config)
        state = jax.jit(optimizer.init)(matrices)

        @jax.jit
        def update(gradients: Any, state: Any, matrices: Any) -> Any:
            updates, state = optimizer.update(gradients, state, matrices)
            return optax.apply_updates(matrices, updates), state

        for seed in range(STEPS):
            _, gradients, (_, routed) = gradients_of(
                params, batch_of(setting, seed), jax.random.key(0), None, None, load
            )
            matrices, state = update(split(gather(gradients), config), state, matrices)
            arrays = joined(matrices, config, arrays)
            params = replaced(params, arrays)
            if load is not None:  # the balance loss uses the load of the step before
                params, load = after_step(params, load, routed, jnp.array(True), config)
            found.append(arrays)
    return found


def replaced(params: nnx.State, arrays: Arrays) -> nnx.State:
    """Parameters in their places, with other numbers."""

    def leaf(path: tuple[Any, ...], old: Any) -> Any:
        value = arrays['.'.join(map(str, path))]
        return old.replace(jax.device_put(value, old.get_value().sharding))

    return nnx.from_flat_state([(at, leaf(at, old)) for at, old in nnx.to_flat_state(params)])


@pytest.mark.parametrize('setting', SETTINGS, ids=str)
def test_steps_on_every_mesh_are_those_of_optax_on_one_device(setting: Setting) -> None:
    actual = trained(setting)
    expected = trained_by_optax(setting.on_one_device._replace(microbatches=1))
    for step in (0, STEPS - 1):
        assert_close(actual[step], expected[step], LIMIT)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    assert_resumes(tmp_path, ZERO_3, ZERO_3, 0)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    'other',
    [
        ZERO_3.on_one_device,
        ZERO_3._replace(data=8, model=1, shard='optimizer'),
        ZERO_3._replace(data=2, model=4, shard='none', sequence_parallel=True),
    ],
    ids=str,
)
def test_a_run_resumed_on_another_mesh_has_nearly_the_same_numbers(
    tmp_path: Path, other: Setting
) -> None:
    assert_resumes(tmp_path, ZERO_3, other, LIMIT)


def assert_resumes(folder: Path, setting: Setting, other: Setting, limit: float) -> None:
    """Save after three steps, and take the others on another mesh."""
    config, resumed = config_of(setting), config_of(other)
    with on_mesh(config), Checkpoints(folder, config) as checkpoints:
        state = random_state(config)
        for seed in range(3):
            state, _ = step_of(setting)(state, batch_of(setting, seed))
        checkpoints.save(state, 3)
    with on_mesh(resumed), Checkpoints(folder, resumed) as checkpoints:
        actual = train(other, checkpoints.restore(3), start=3)[1]
    assert_close(actual[-1], trained(setting)[-1], limit)
