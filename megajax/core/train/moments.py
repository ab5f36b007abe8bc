"""Adam's moments in bf16 between steps (`optim.moments_dtype`), which halves their memory.

A step computes with the moments in fp32 and rounds each one up or down at random, so that the
expected result is the number itself. If numbers were rounded to the nearest, a second moment would
never change: with beta2=0.999, a step changes it by less than half of the distance between two bf16
numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from megajax.core.parallel.layout import UNSHARDED, Layout
from megajax.core.parallel.shard_digests import mix

ODD = 0x9E3779B9  # 2**32 over the golden ratio: multiples of it are far from one another


def with_moments_in_bf16(
    adam: optax.GradientTransformation, layout: Layout = UNSHARDED
) -> optax.GradientTransformation:
    """Store the moments of `optax.scale_by_adam` in bf16; `layout` is the parameters' layout."""

    def init(params: Any) -> Any:
        return _map_moments(lambda x, *_: x.astype(jnp.bfloat16), adam.init(params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        in_fp32 = _map_moments(lambda x, *_: x.astype(jnp.float32), state)
        updates, state = adam.update(gradients, in_fp32, params)
        step = state.count.astype(jnp.uint32)

        def round_moment(x: jax.Array, index: jax.Array, is_stacked: bool) -> jax.Array:
            seed = mix(step * jnp.uint32(ODD) + index)
            return round_to_bf16(x, seed, layout if is_stacked else UNSHARDED)

        return updates, _map_moments(round_moment, state)

    return optax.GradientTransformation(init, update)


def round_to_bf16(x: jax.Array, seed: jax.Array, layout: Layout = UNSHARDED) -> jax.Array:
    """Round fp32 x up with a probability equal to the fraction that rounding down would lose.

    The random bits are a hash of the seed and an element's index in the array, so they are the same
    on every mesh. If `layout` stores the layers in a different order, the hash uses each layer's
    index in the model. Zeros, infinities and NaN do not change.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) + (_random_bits(x, seed, layout) >> 16)
    rounded = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _random_bits(x: jax.Array, seed: jax.Array, layout: Layout) -> jax.Array:
    """Return 32 random bits for each element of x, whatever the sizes of other dims are."""
    sharding, place = jax.typeof(x).sharding, seed
    for dim in range(x.ndim):
        index = lax.broadcasted_iota(jnp.uint32, x.shape, dim, out_sharding=sharding)
        if dim == 0 and layout.chunks > 1:
            index = layout.layer_at(index, len(x))
        place = place * jnp.uint32(ODD) + index
    return mix(place)


def _map_moments(function: Callable[[jax.Array, Any, bool], jax.Array], state: Any) -> Any:
    """Apply `function(x, index, is_stacked)` to each array of both moments.

    Each array has a different index. `is_stacked` is whether it holds the parameters of all layers.
    """
    leaves, tree = jax.tree.flatten((state.mu, state.nu), is_leaf=_is_variable)

    def apply(leaf: Any, index: int) -> Any:
        if not _is_variable(leaf):
            return function(leaf, jnp.uint32(index), False)
        return leaf.replace(function(leaf.get_value(), jnp.uint32(index), leaf.declared.is_stacked))

    mu, nu = jax.tree.unflatten(tree, map(apply, leaves, range(len(leaves))))
    return state._replace(mu=mu, nu=nu)


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
