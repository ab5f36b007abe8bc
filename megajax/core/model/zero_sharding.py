"""All-gather ZeRO-sharded matrices for use in a step, and reduce-scatter their gradients.

Between steps, ZeRO shards these matrices over `data`. A step gathers them in the compute dtype.
Their gradients are reduced over `data` to the shards that the devices store. XLA emits one
all-gather per use and one reduce-scatter.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from megajax.core.counts.declaration import Parameter
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.parallel.layout import EXPERT, Axes, Layout


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
    """All-gather a ZeRO-sharded matrix to the sharding of the computation, without padding."""
    x = jax.reshard(x, layout(dims))  # all-gather over data
    for dim, size in enumerate(layout.unpadded(dims)):
        if size is not None and size != x.shape[dim]:
            x = lax.slice_in_dim(x, 0, size, axis=dim)
    return x


def dtype_of_sum(dtype: DTypeLike, shards: int) -> DTypeLike:
    """Return the dtype in which to sum a gradient over shards; a single one is not rounded."""
    return dtype if shards > 1 else jnp.float32


def reduce(
    gradient: jax.Array,
    dims: str,
    layout: Layout,
    dtype: DTypeLike,
    replicas: Sequence[Axes] = (),
) -> jax.Array:
    """Reduce-scatter a matrix's gradients [*replicas, data shard, *dims], in `dtype`, over data."""
    lead = len(replicas)
    dtype = dtype_of_sum(dtype, gradient.shape[lead])
    padded = pad(gradient.astype(dtype), '-' * (lead + 1) + dims, layout)
    spec = layout.stacked(dims, replicas, at_rest=True)
    total = lax.reduce_sum(padded, (lead,), out_sharding=spec)
    return total.astype(jnp.float32)  # reduce-scatter over data


def sum_of_own_experts(
    gradient: jax.Array,
    dims: str,
    layout: Layout,
    dtype: DTypeLike,
    replicas: Sequence[Axes] = (),
    *,
    at_rest: bool = True,
) -> jax.Array:
    """Sum gradients [*replicas, data shard, *dims] of experts within replicas.

    The data shards along `expert` hold the gradients of different experts, so these are not added.
    With `at_rest`, the sums have the stored sharding of a matrix.
    """
    lead, split = len(replicas), dims.replace('X', 'X-')
    axes = jax.typeof(gradient).sharding.spec[lead]
    apart = [(axis,) for axis in axes]
    if at_rest and any(layout.padding(dims)):
        gradient = pad(gradient, '-' * (lead + 1) + dims, layout)
    parts, rest = layout.sizes_of(apart), gradient.shape[lead + 1 :]
    dtype = dtype_of_sum(dtype, gradient.shape[lead] // layout.num_shards('X'))
    spec = layout.stacked(dims.replace('X', 'x'), [*replicas, *apart])
    gradient = gradient.astype(dtype).reshape(
        *gradient.shape[:lead], *parts, *rest, out_sharding=spec
    )
    at = lead + len(apart) - 1 + split.index('X')
    gradient = jnp.moveaxis(gradient, lead + axes.index(EXPERT), at)
    # reduce-scatter over data (all-reduce without ZeRO)
    total = lax.reduce_sum(
        gradient,
        tuple(range(lead, lead + len(apart) - 1)),
        out_sharding=layout.stacked(split, replicas, at_rest=at_rest),
    )
    at = lead + dims.index('X')
    return total.reshape(*total.shape[:at], -1, *total.shape[at + 2 :]).astype(jnp.float32)


def sum_of_vector(
    gradient: jax.Array, dims: str, shards: tuple[Axes, ...], layout: Layout
) -> jax.Array:
    """Sum gradients [*shards, *dims] of a replicated parameter over all shards."""
    # All data shards are one dim, because XLA for CPUs would sum over each mesh axis in turn.
    shape = -1, *gradient.shape[len(shards) :]
    merged = tuple(axis for axes in shards for axis in axes)
    gradient = gradient.reshape(shape, out_sharding=layout.stacked(dims, [merged]))
    return lax.reduce_sum(gradient, (0,), out_sharding=layout(dims))  # all-reduce


def slotted(
    x: jax.Array, weight: jax.Array | None, dims: str, layout: Layout, reduce_dtype: str
) -> Slotted:
    """Pair the weight to compute with and an fp32 slot whose gradient becomes the gradient of x.

    x is a ZeRO-sharded matrix. Without a `weight`, each matmul gathers x, and its backward pass
    gathers x again, so that no gathered weight is saved in between.
    """
    slot = _slot(x, dims, layout, reduce_dtype)
    if weight is None:
        return Slotted(weight=x, slot=slot, at_rest=True)
    return Slotted(weight=weight, slot=slot)


def without_slot(x: jax.Array, weight: jax.Array | None) -> Slotted:
    """Return the frozen `weight` to compute with; if None, return x, which each matmul gathers."""
    return Slotted(weight=x if weight is None else weight, slot=None, at_rest=weight is None)


def pad(x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Return an array padded like a stored matrix with these dims."""
    added = layout.padding(dims)
    return jnp.pad(x, [(0, count) for count in added]) if any(added) else x


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _slot(x: jax.Array, dims: str, layout: Layout, dtype: str) -> jax.Array:
    """Return fp32 zeros to differentiate with respect to, in place of the gathered matrix.

    The cotangent of these zeros is reduced and becomes the gradient of x.
    """
    shape = tuple(size or own for size, own in zip(layout.unpadded(dims), x.shape, strict=True))
    spec = layout(dims)
    if 'X' in dims:
        shape, spec = layout.of_own_experts(shape, dims)
    return jnp.zeros(shape, jnp.float32, out_sharding=spec)


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

    For `vmap`, a ZeRO-sharded matrix is not mapped over data shards, so its gradient must not be
    mapped either: the rule returns the sum as an unmapped result.
    """
    is_of_own_experts = 'X' in dims and bool(layout.mesh_axes('X'))

    @jax.custom_batching.custom_vmap
    def total(gradient: jax.Array) -> jax.Array:
        if is_of_own_experts:  # only traced, for the type of its result
            at, shards = dims.index('X'), layout.num_shards('X')
            shape = *gradient.shape[:at], gradient.shape[at] * shards, *gradient.shape[at + 1 :]
            gradient = jnp.zeros(shape, gradient.dtype, out_sharding=layout(dims))
        return scatter(gradient, dims, layout)

    @total.def_vmap
    def over_data(size: int, batched: list[bool], gradient: jax.Array) -> tuple[jax.Array, bool]:
        assert all(batched)
        if is_of_own_experts:
            return sum_of_own_experts(gradient, dims, layout, dtype), False
        return reduce(gradient, dims, layout, dtype), False

    return total
