"""The forward and the backward pass of a stage's layers, and what is kept between the two.

With `train.recompute=full` that is the input, and the backward pass runs the layers again.
Otherwise it is what differentiation saves: `jax.vjp` returns a pytree whose leaves are what the
backward pass reads. Those among them that it was given, such as weights, are given again and not
kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

RECOMPUTE = 'recompute'  # the scope of what a backward pass runs again
Tree = Any
# A function of the parameters to differentiate, of a tree that is given to both passes, and of x.
Run = Callable[[Tree, Tree, jax.Array], jax.Array]


class Passes(NamedTuple):
    """Two functions to be mapped over stages and shards, the first one before the second."""

    forward: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, Tree]]  # -> (y, kept)
    # (params, given, kept, dy) -> (dparams, dx)
    backward: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, jax.Array]]


def keeping_inputs(run: Run) -> Passes:
    """Keep the input of a stage, which runs twice."""

    def forward(params: Tree, given: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        return run(params, given, x), x

    def backward(params: Tree, given: Tree, x: Tree, dy: jax.Array) -> tuple[Tree, jax.Array]:
        with jax.named_scope(RECOMPUTE):
            _, pullback = jax.vjp(lambda params, x: run(params, given, x), params, x)
        return pullback(dy)

    return Passes(forward, backward)


def keeping_residuals(run: Run) -> Passes:
    """Keep what differentiation saves."""
    # The structure of what `jax.vjp` returned, and of each leaf its place in the tree that is given
    # again or how to make it from what was kept. Tracing the forward pass finds the same each time.
    found: list[tuple[Any, list[int | Callable[[jax.Array], jax.Array]]]] = []

    def forward(params: Tree, given: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        y, pullback = jax.vjp(lambda params, x: run(params, given, x), params, x)
        leaves, structure = jax.tree.flatten(pullback)
        places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((params, given)))}
        found[:] = [(structure, [places.get(id(leaf), _unpack(leaf)) for leaf in leaves])]
        return y, [_pack(leaf) for leaf in leaves if id(leaf) not in places]

    def backward(params: Tree, given: Tree, kept: Tree, dy: jax.Array) -> tuple[Tree, jax.Array]:
        ((structure, sources),) = found
        again, kept = jax.tree.leaves((params, given)), iter(kept)
        leaves = [
            again[source] if isinstance(source, int) else source(next(kept)) for source in sources
        ]
        return jax.tree.unflatten(structure, leaves)(dy)

    return Passes(forward, backward)


def _pack(leaf: jax.Array) -> jax.Array:
    """Return a random key as numbers, and other arrays as they are."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _unpack(leaf: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Return the inverse of `_pack`."""
    if not _is_key(leaf):
        return lambda x: x
    return partial(jax.random.wrap_key_data, impl=jax.random.key_impl(leaf))


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
