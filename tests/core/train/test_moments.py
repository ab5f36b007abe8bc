"""Adam's moments in bf16: rounded without bias, alike on every mesh, and never stuck."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P
from jax.sharding import AxisType
from steps import Setting, batch_of
from support import assert_close, gather, on_mesh, random_state

from megajax.core.train.moments import round_to_bf16, with_moments_in_bf16
from megajax.core.train.step import init_state, make_train_step

STEPS = 2000


def roundings(value: float, count: int) -> np.ndarray:
    """One number rounded `count` times in 16 places of an array, [count, 16]."""
    with jax.set_mesh(jax.make_mesh((1,), ('data',))):
        many = jax.jit(jax.vmap(round_to_bf16, in_axes=(None, 0)))
        seeds = jnp.arange(count, dtype=jnp.uint32)
        return np.asarray(many(jnp.full((4, 4), value, jnp.float32), seeds), np.float64)


@pytest.mark.parametrize('value', [1.001, -1.001, 3.7e-9, 1.9999, 255.3])
def test_the_mean_of_many_roundings_is_the_number(value: float) -> None:
    rounded = roundings(value, 4096).reshape(4096, 16)
    below, above = np.unique(rounded)  # no others than the two next to it
    assert below < value < above
    for mean, count in [(rounded.mean(), rounded.size), *((x, 4096) for x in rounded.mean(0))]:
        assert abs(mean - np.float32(value)) < 4 * (above - below) / 2 / count**0.5


def test_places_and_seeds_are_rounded_independently_of_one_another() -> None:
    rounded = roundings(1.00390625 - 2**-9, 4096).reshape(4096, 16)  # in the middle of two numbers
    is_up = rounded > 1
    assert np.abs(np.corrcoef(is_up.T) - np.eye(16)).max() < 5 / 4096**0.5
    assert np.abs(np.corrcoef(is_up[:-1, 0], is_up[1:, 0])[0, 1]) < 5 / 4096**0.5


@pytest.mark.parametrize('value', [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -0.15625])
def test_what_bf16_can_represent_is_not_changed(value: float) -> None:
    np.testing.assert_array_equal(roundings(value, 64), np.full((64, 4, 4), value))


def moments(adam: optax.GradientTransformation) -> Any:
    """Adam's state after many random gradients of which some elements are always zero."""
    scale = np.where(np.arange(256) % 4, np.geomspace(1e-6, 10, 256), 0).astype(np.float32)

    def step(state: Any, key: jax.Array) -> tuple[Any, None]:
        return adam.update(scale * jax.random.normal(key, (256,)), state)[1], None

    keys = jax.random.split(jax.random.key(0), STEPS)
    with jax.set_mesh(jax.make_mesh((1,), ('data',))):
        state = adam.init(jnp.zeros(256))
        return jax.jit(lambda: jax.lax.scan(step, state, keys)[0])()


def test_a_second_moment_follows_the_one_in_fp32_and_does_not_get_stuck() -> None:
    adam = optax.scale_by_adam(b1=0.9, b2=0.999)
    expected, actual = moments(adam), moments(with_moments_in_bf16(adam))
    assert actual.mu.dtype == actual.nu.dtype == jnp.bfloat16
    is_zero = np.asarray(expected.nu) == 0
    assert is_zero.sum() == 64
    assert not np.asarray(actual.nu, np.float32)[is_zero].any()
    ratios = np.asarray(actual.nu, np.float64)[~is_zero] / np.asarray(expected.nu)[~is_zero]
    assert abs(ratios.mean() - 1) < 0.02
    assert np.abs(ratios - 1).max() < 0.25


def test_an_element_is_rounded_alike_wherever_it_lies_and_however_much_pads_the_array() -> None:
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        padded = np.pad(x, [(0, 0), (0, 2), (0, 0)])
        sharded = jax.device_put(padded, NamedSharding(mesh, P(None, 'data', 'model')))
        rounded = jax.jit(round_to_bf16)(sharded, jnp.uint32(3))
        assert jax.typeof(rounded).sharding.spec == P(None, 'data', 'model')
        expected = jax.jit(round_to_bf16)(x, jnp.uint32(3))
        np.testing.assert_array_equal(np.asarray(rounded)[:, :6], expected)
        assert not np.asarray(rounded)[:, 6:].any()


def test_the_moments_of_a_state_are_in_bf16_and_nothing_else_is() -> None:
    config = Setting('bert', 2, 2, 'weights', moments_dtype='bfloat16').config
    with on_mesh(config):
        state = jax.eval_shape(lambda: init_state(config))
    moments = [optax.tree_utils.tree_get(state.opt_state, name) for name in ('mu', 'nu')]
    assert {x.dtype for x in jax.tree.leaves(moments)} == {jnp.dtype('bfloat16')}
    count = sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state))
    assert count == 2 * len(jax.tree.leaves(state.params))


@pytest.mark.slow
def test_moments_are_alike_on_every_mesh() -> None:
    states = []
    for mesh in ((1, 1), (3, 2)):  # 3 pads every matrix
        setting = Setting(
            'llama', *mesh, 'weights', sequence_parallel=mesh[1] > 1, moments_dtype='bfloat16'
        )
        config = setting.config
        with on_mesh(config):
            step, state = make_train_step(config), random_state(config)
            for seed in range(3):
                state, _ = step(state, batch_of(setting, seed))
            moments = [optax.tree_utils.tree_get(state.opt_state, name) for name in ('mu', 'nu')]
            states.append((gather(state.params), *map(gather, moments)))
    for expected, actual in zip(*states, strict=True):
        assert_close(actual, expected, 1e-2)
    # Gradients differ in their last bits alone, so few moments are rounded to the other side.
    one, other = (np.concatenate([x.ravel() for x in nu.values()]) for _, _, nu in states)
    assert np.mean(one != other) < 0.01
