"""All-gather ZeRO-sharded matrices for use in a step, and reduce-scatter their gradients.

Between steps ZeRO shards these matrices over `data`. A step gathers them in the compute dtype. Each
gradient is reduced over `data` to the shard that each device stores. XLA emits one all-gather per
use and one reduce-scatter.
"""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from megajax.core.counts.declaration import Parameter
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.parallel.layout import Layout


def reduced_in_backward(declared: Parameter, shard: str) -> bool:
    """Whether the backward pass of each microbatch sums a parameter's gradient over `data`.

    The gradients of the other parameters are summed once, after the last microbatch. `shard` is
    `optim.shard`.
    """
    return shard in ('gradients', 'weights') and declared.is_in_microbatches


def scatter(x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Return a matrix in its stored sharding, padded to a multiple of the number of shards."""
    return jax.reshard(pad(x, dims, layout), layout(dims, at_rest=True))


def gather(x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """All-gather a ZeRO-sharded matrix to its sharding in the computation, without padding."""
    x = jax.reshard(x, layout(dims))  # all-gather over data
    for dim, size in enumerate(layout.unpadded(dims)):
        if size is not None and size != x.shape[dim]:
            x = lax.slice_in_dim(x, 0, size, axis=dim)
    return x


def reduce(gradient: jax.Array, dims: str, layout: Layout, dtype: DTypeLike) -> jax.Array:
    """Reduce-scatter a matrix's gradients [data shard, *dims], in `dtype`, to its stored shards."""
    padded = pad(gradient.astype(dtype), '-' + dims, layout)
    total = lax.reduce_sum(padded, (0,), out_sharding=layout(dims, at_rest=True))
    return total.astype(jnp.float32)  # reduce-scatter over data


def slotted(
    x: jax.Array, weight: jax.Array | None, dims: str, layout: Layout, reduce_dtype: str
) -> Slotted:
    """Pair the weight to compute with and an fp32 slot whose gradient becomes the gradient of x.

    x is a ZeRO-sharded matrix. Without a `weight`, each matmul gathers x itself, and again in its
    backward pass, so that no gathered weight is saved in between.
    """
    slot = _slot(x, dims, layout, reduce_dtype)
    if weight is None:
        return Slotted(weight=x, slot=slot, at_rest=True)
    return Slotted(weight=weight, slot=slot)


def without_slot(x: jax.Array, weight: jax.Array | None) -> Slotted:
    """Return the frozen `weight` to compute with; if None, return x, which each matmul gathers."""
    return Slotted(weight=x if weight is None else weight, slot=None, at_rest=weight is None)


def pad(x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Return an array with the padding of a stored matrix with these dims."""
    added = layout.padding(dims)
    return jnp.pad(x, [(0, count) for count in added]) if any(added) else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _slot(x: jax.Array, dims: str, layout: Layout, dtype: str) -> jax.Array:
    """Return fp32 zeros to differentiate with respect to, in place of the gathered matrix.

    The cotangent of these zeros is reduced and becomes the gradient of x.
    """
    shape = (size or own for size, own in zip(layout.unpadded(dims), x.shape, strict=True))
    return jnp.zeros(tuple(shape), jnp.float32, out_sharding=layout(dims))


def _slot_forward(x: jax.Array, dims: str, layout: Layout, dtype: str) -> tuple[jax.Array, None]:
    return _slot(x, dims, layout, dtype), None


def _slot_backward(
    dims: str, layout: Layout, dtype: str, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    return (sum_over_data(gradient, dims, layout, dtype),)


_slot.defvjp(_slot_forward, _slot_backward)


def sum_over_data(gradient: jax.Array, dims: str, layout: Layout, dtype: str) -> jax.Array:
    """Reduce-scatter a gradient over the data shards that a `vmap` maps."""
    return _sum_over_data(dims, layout, dtype)(gradient)


@cache
def _sum_over_data(dims: str, layout: Layout, dtype: str) -> Any:
    """Return a function that sums a gradient over the data shards that a `vmap` maps.

    To `vmap` a ZeRO-sharded matrix belongs to no single data shard, so its gradient must not
    either: the rule returns the sum as a result that is not mapped.
    """

    @jax.custom_batching.custom_vmap
    def total(gradient: jax.Array) -> jax.Array:
        return scatter(gradient, dims, layout)

    @total.def_vmap
    def over_data(size: int, batched: list[bool], gradient: jax.Array) -> tuple[jax.Array, bool]:
        assert all(batched)
        return reduce(gradient, dims, layout, dtype), False

    return total
