"""The forward and backward pass of some layers, and the values saved between the two.

With `train.recompute=full` a pipeline stage saves only its input, and its backward pass runs the
layers again. Otherwise the residuals are saved: `jax.vjp` returns a pytree whose leaves are the
arrays that the backward pass reads. Leaves that are arguments, such as weights, are passed again
instead of being saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

RECOMPUTE = 'recompute'  # the named scope of recomputed operations
Tree = Any
# A function of the parameters to differentiate, of a tree that both passes get, and of x.
Run = Callable[[Tree, Tree, Tree], Tree]


class LayerPasses(NamedTuple):
    """Two functions, which a pipeline maps over stages and shards; `forward` runs first."""

    forward: Callable[[Tree, Tree, jax.Array], tuple[jax.Array, Tree]]  # -> (y, kept)
    # (params, given, kept, dy) -> (dparams, dx)
    backward: Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, jax.Array]]


def keeping_inputs(run: Run) -> LayerPasses:
    """Return passes that save only x; the backward pass runs the layers again."""

    def forward(params: Tree, given: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        return run(params, given, x), x

    def backward(params: Tree, given: Tree, x: Tree, dy: jax.Array) -> tuple[Tree, jax.Array]:
        with jax.named_scope(RECOMPUTE):
            _, pullback = jax.vjp(lambda params, x: run(params, given, x), params, x)
        return pullback(dy)

    return LayerPasses(forward, backward)


def keeping_residuals(run: Run) -> LayerPasses:
    """Return passes that save the residuals of differentiation."""
    # The structure of `jax.vjp`'s result and, for each leaf, either its index in the tree that is
    # passed again or a function that restores it from the saved array. Every trace of the forward
    # pass finds the same structure.
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

    return LayerPasses(forward, backward)


def on_views(run: Run, view: Callable[[Tree], Tree]) -> Run:
    """Return the function `run(view(params), view(given), x)`, which saves no views of parameters.

    A view is a slice or another shape of stacked layers. jax saves the views that the backward pass
    reads, and XLA stores them as copies. This function's backward pass views the parameters again.
    `given` gets no gradient.
    """

    def apply(params: Tree, given: Tree, x: Tree) -> Tree:
        # `custom_vjp` differentiates with respect to arguments only, so what `run` closes over
        # becomes an argument.
        traced, y = jax.make_jaxpr(run, return_shape=True)(view(params), view(given), x)

        def closed_run(params: Tree, closed_over: Tree, given: Tree, x: Tree) -> Tree:
            evaluate = jaxpr_as_fun(traced.replace(consts=closed_over))
            return jax.tree.unflatten(
                jax.tree.structure(y), evaluate(*jax.tree.leaves((params, given, x)))
            )

        passes = keeping_residuals(
            lambda params, given, x: closed_run(params[0], params[1], given, x)
        )

        @jax.custom_vjp
        def function(params: Tree, closed_over: Tree, given: Tree, x: Tree) -> Tree:
            return closed_run(view(params), closed_over, view(given), x)

        def forward(params: Tree, closed_over: Tree, given: Tree, x: Tree) -> tuple[Tree, Tree]:
            y, kept = passes.forward((view(params), closed_over), view(given), x)
            return y, (params, closed_over, given, kept)

        def backward(saved: Tree, dy: Tree) -> tuple[Tree, Tree, None, Tree]:
            params, closed_over, given, kept = saved
            views, pullback = jax.vjp(view, params)
            (dviews, dclosed), dx = passes.backward((views, closed_over), view(given), kept, dy)
            return *pullback(dviews), dclosed, None, dx

        function.defvjp(forward, backward)
        return function(params, traced.consts, given, x)

    return apply


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
