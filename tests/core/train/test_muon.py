"""Muon: its updates are those of optax on one device, wherever the pieces of a matrix are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers
from optax_muon import optimizer_of_optax, split
from steps import Setting
from support import assert_close, exhaustive, gather, in_layer_order, on_mesh, random_params, slow
from vlm import vlm

from megajax.analysis.plan.layouts import changed
from megajax.core.config import Config
from megajax.core.counts.whole_matrices import pools
from megajax.core.train.muon import coefficients, orthogonalized
from megajax.core.train.optimizer import make_optimizer

STEPS = 5
MUON = {'optim__kind': 'muon', 'optim__eps': 1e-8, 'optim__weight_decay': 0.1}
ONE_DEVICE = Setting('llama', 1, 1, hidden_size=60)


def config_of(setting: Setting, **changes: Any) -> Config:
    return changed(setting.config, **MUON | changes)


def gradients_at(params: Any, step: Any) -> Any:
    """Gradients that follow from the parameters' numbers, whatever their places."""
    return jax.tree.map(lambda x: jnp.sin((step + 3) * 40 * x), params)


@functools.cache
def updated(setting: Setting, steps: int = STEPS, **changes: Any) -> dict[str, np.ndarray]:
    """The parameters after some steps of the optimizer alone."""
    config = config_of(setting, **changes)
    with on_mesh(config):
        optimizer, params = make_optimizer(config), random_params(config, std=0.05)
        start, state = params, jax.jit(optimizer.init)(params)

        @jax.jit
        def step(params: Any, state: Any, number: jax.Array) -> Any:
            updates, state = optimizer.update(gradients_at(start, number), state, params)
            return optax.apply_updates(params, updates), state

        for number in range(steps):
            params, state = step(params, state, jnp.int32(number))
        return in_layer_order(gather(params), config)


def updated_by_optax(setting: Setting, steps: int = STEPS, **changes: Any) -> dict[str, jax.Array]:
    config = config_of(setting, **changes)
    with on_mesh(config):
        params = start = split(gather(random_params(config, std=0.05)), config)
    optimizer = optimizer_of_optax(config)

    @jax.jit
    def step(params: Any, state: Any, number: jax.Array) -> Any:
        updates, state = optimizer.update(gradients_at(start, number), state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for number in range(steps):
        params, state = step(params, state, jnp.int32(number))
    return params


@pytest.mark.parametrize(
    ('name', 'steps', 'changes'),
    [
        ('llama', STEPS, {}),
        slow('experts', 1, {}),
        ('gpt', 1, {'optim__nesterov': False, 'optim__ns_coefficients': 'polar_express'}),
    ],
)
def test_updates_on_one_device_are_those_of_optax(name: str, steps: int, changes: Any) -> None:
    setting = ONE_DEVICE._replace(name=name)
    expected = updated_by_optax(setting, steps, **changes)
    actual = split(updated(setting, steps, **changes), config_of(setting))
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize('name', ['standard', 'dion'])
def test_coefficients_are_those_of_optax(name: str) -> None:
    kind = {'standard': 'quintic'}.get(name, name)
    config = config_of(ONE_DEVICE, optim__ns_coefficients=kind)
    (form, *_) = pools(config)
    matrices = jax.random.normal(jax.random.key(0), (2, *form.shape))
    optimizer = optax.contrib.muon(1.0, name, beta=0.0, nesterov=False, consistent_rms=0.2)
    each = jax.vmap(lambda x: optimizer.update(x, optimizer.init(x), x)[0])
    expected = jax.jit(each)(matrices)
    actual = jax.jit(lambda x: orthogonalized({form: x}, config.optim)[form])(matrices)
    np.testing.assert_allclose(actual, -expected, atol=1e-5)


def test_polar_express_brings_singular_values_from_a_thousandth_to_one_near_one() -> None:
    optim = config_of(ONE_DEVICE, optim__ns_coefficients='polar_express').optim
    values = np.geomspace(1e-3, 1, 1000)
    for a, b, c in coefficients(optim):
        values = a * values + b * values**3 + c * values**5
    assert 0.84 < values.min() <= values.max() < 1.13


def test_16_bits_round_the_updates_but_not_their_size() -> None:
    config = config_of(ONE_DEVICE)
    (form, *_) = pools(config)
    matrices = jax.random.normal(jax.random.key(0), (2, *form.shape), jnp.bfloat16)
    muon = optax.contrib.scale_by_muon(
        beta=0.0, nesterov=False, weight_dimension_numbers=MuonDimensionNumbers(1, 2)
    )
    unscaled = jax.jit(lambda x: muon.update(x, muon.init(x))[0])(matrices)
    updates = jax.jit(lambda x: orthogonalized({form: x}, config.optim)[form])(matrices)
    assert updates.dtype == jnp.bfloat16
    norms = [jnp.linalg.norm(x.astype(jnp.float32)) for x in (updates, unscaled)]
    size = 0.2 * max(form.shape) ** 0.5
    assert abs(float(jnp.bfloat16(size)) / size - 1) > 5e-4
    assert norms[0] / norms[1] == pytest.approx(size, rel=1e-4)


@pytest.mark.parametrize(
    'setting',
    [
        # 8 divides neither 60 nor the number of matrices of any pool.
        slow(ONE_DEVICE._replace(data=8, shard='optimizer')),
        # Fewer key/value heads than devices along `model`; two replicas.
        ONE_DEVICE._replace(data=2, model=4, replicas=2, shard='weights'),
        slow(ONE_DEVICE._replace(name='experts', data=4, experts=2, model=2, shard='weights')),
        exhaustive(ONE_DEVICE._replace(data=8)),
        slow(ONE_DEVICE._replace(model=8)),
        exhaustive(ONE_DEVICE._replace(data=4, model=2, shard='weights')),
        # Two pools of which each device gathers a part of every matrix.
        ONE_DEVICE._replace(data=4, model=2, sequence_parallel=True),
        exhaustive(ONE_DEVICE._replace(data=2, context=2, model=2)),
        exhaustive(ONE_DEVICE._replace(data=8, replicas=4, shard='gradients')),
        exhaustive(
            ONE_DEVICE._replace(
                data=2, model_rows=2, model=2, shard='optimizer', sequence_parallel=True
            )
        ),
        exhaustive(
            ONE_DEVICE._replace(data=2, stages=2, model=2, shard='optimizer', microbatches=2)
        ),
        exhaustive(ONE_DEVICE._replace(data=2, context=2, model=2, shard='weights')),
    ],
    ids=str,
)
def test_updates_are_equal_on_every_mesh(setting: Setting) -> None:
    assert_close(updated(setting), updated(ONE_DEVICE._replace(name=setting.name)), 1e-5)


@pytest.mark.slow
def test_momentum_in_bf16_changes_little() -> None:
    expected, actual = updated(ONE_DEVICE), updated(ONE_DEVICE, optim__moments_dtype='bfloat16')
    assert_close(actual, expected, 2e-2)
    assert any(not np.array_equal(actual[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_layers_that_attend_to_images_are_updated_alike_on_every_mesh() -> None:
    def updates(config: Config) -> dict[str, np.ndarray]:
        config = changed(config, **MUON)
        with on_mesh(config):
            optimizer, params = make_optimizer(config), random_params(config, std=0.05)
            update = jax.jit(lambda x: optimizer.update(gradients_at(x, 0), optimizer.init(x), x))
            return gather(update(params)[0])

    expected = updates(vlm(1, 1, crossed=True))
    assert_close(updates(vlm(2, 2, crossed=True, optim={'shard': 'weights'})), expected, 1e-4)
