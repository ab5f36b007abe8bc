"""A function of views of its parameters, and what it saves for its backward pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megajax.core.model.residuals import on_views

LAYERS, ROWS, SIZE = 4, 3, 8
KEY = jax.random.key(0)
WEIGHTS = jax.random.normal(KEY, (LAYERS, SIZE, SIZE))
KEYS = jax.random.split(KEY, LAYERS)
X = jax.random.normal(KEY, (ROWS, SIZE))
Function = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def in_pairs(layers: jax.Array) -> jax.Array:
    return layers.reshape(LAYERS // 2, 2, *layers.shape[1:])


def layer(scale: jax.Array, weight: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
    dropped = jax.random.bernoulli(key, 0.5, x.shape)
    return x + scale[None] * jnp.where(dropped, 0, jnp.tanh(x @ weight))


def of_arguments(scale: jax.Array, weights: jax.Array, keys: jax.Array, x: jax.Array) -> jax.Array:
    """Two layers in each iteration of a loop, as in a pattern."""

    def pair(x: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for place in range(2):
            x = layer(scale, each[0][place], each[1][place], x)
        return x, None

    return lax.scan(pair, x, (in_pairs(weights), in_pairs(keys)))[0]


def of_views(scale: jax.Array, weights: jax.Array, keys: jax.Array, x: jax.Array) -> jax.Array:
    def pair(x: jax.Array, each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        for place in range(2):
            x = on_views(partial(layer, scale), lambda x, place=place: x[place])(*each, x)
        return x, None

    def loop(weights: jax.Array, keys: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(pair, x, (weights, keys))[0]

    return on_views(loop, in_pairs)(weights, keys, x)


@pytest.mark.parametrize('transform', [jax.jit, lambda f: jax.jit(jax.checkpoint(f))])
def test_gradients_are_those_without_views(transform: Callable[[Any], Any]) -> None:
    def differentiated(function: Function) -> Any:
        def loss(scale: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
            return function(scale, weights, KEYS, x).sum()

        return jax.value_and_grad(transform(loss), argnums=(0, 1, 2))(jnp.ones(SIZE), WEIGHTS, X)

    expected, found = map(differentiated, (of_arguments, of_views))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def saved(function: Function) -> list[tuple[int, ...]]:
    """The shapes of the arrays that the backward pass reads, apart from the arguments."""
    shapes = []

    def differentiated(scale: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
        def of_floats(scale: jax.Array, weights: jax.Array, x: jax.Array) -> jax.Array:
            return function(scale, weights, KEYS, x)

        y, pullback = jax.vjp(of_floats, scale, weights, x)
        given = {id(each) for each in (scale, weights, x)}
        shapes.extend(each.shape for each in jax.tree.leaves(pullback) if id(each) not in given)
        return y

    jax.eval_shape(differentiated, jnp.ones(SIZE), WEIGHTS, X)
    return shapes


def test_views_of_parameters_are_not_saved() -> None:
    matrices = LAYERS // 2, SIZE, SIZE
    assert saved(of_arguments).count(matrices) == 2
    assert matrices not in saved(of_views)
    assert WEIGHTS.shape not in saved(of_views)
