"""Parameters and their gradients in the form that pipeline stages use.

The letters Z and W are stages and the chunks of layers of a stage (`core/parallel/layout.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.counts.declaration import Parameter
from megajax.core.model.parameters import map_parameters
from megajax.core.model.shard_copies import dims_of_shard
from megajax.core.parallel.layout import EXPERT, STAGE, STAGES, Layout
from megajax.core.parallel.pipeline_ops import to_shards
from megajax.core.train.zero import shards_of

Tree = Any


def split_layers(params: nnx.State, layout: Layout) -> tuple[Tree, dict[str, Tree]]:
    """Return the layers, as [Z, W, layer, ...], and the parameters outside them.

    Each stage has its layers in this order already, so nothing moves.
    """
    stages, chunks = layout.num_shards('L'), layout.chunks

    def split(x: jax.Array) -> jax.Array:
        spec = STAGES.like(jax.typeof(x).sharding.spec, 'Z*->Z--*')
        return x.reshape(stages, chunks, -1, *x.shape[1:], out_sharding=spec)

    outside = dict(params.raw_mapping)
    layers = outside.pop('layers')
    return jax.tree.map(split, layers), outside


def of_own_experts(layers: Tree, layout: Layout) -> tuple[Tree, Tree]:
    """Return layers [Z, W, layer, ...], and whether each array has a dim of data shards.

    The experts of a data shard become [Z, W, *shards, layer, ...]; each device already has its own
    experts.
    """

    def is_shared(declared: Parameter, x: jax.Array) -> bool:
        return bool(layout.mesh_axes('X')) and declared.is_of_experts and _is_over(x, EXPERT)

    def of_shards(declared: Parameter, x: jax.Array) -> jax.Array:
        if not is_shared(declared, x):
            return x
        spec = layout.stacked(
            f'-{dims_of_shard(declared, layout)[1:]}', ((STAGE,), (), *layout.mapped)
        )
        return to_shards(x, len(layout.mapped), spec)

    return map_parameters(of_shards, layers), map_parameters(is_shared, layers)


def with_layers(outside: dict[str, Tree], layers: Tree) -> nnx.State:
    """Return the parameters of a model, given its layers and the parameters outside them."""
    return nnx.State({**outside, 'layers': layers})


def zeros_of_layers(layers: Tree, layout: Layout) -> Tree:
    """Return zeros [Z, W, *shards, layer, ...] to add up the gradients of [Z, W, layer, ...]."""
    shards = layout.mapped

    def zeros(declared: Parameter, x: jax.Array) -> jax.Array:
        rest = dims_of_shard(declared, layout)[1:]
        has_shards = x.ndim > 3 + len(rest)  # the array holds a data shard's own experts
        of_shards = () if has_shards else layout.sizes_of(shards)
        shape = *x.shape[:2], *of_shards, *x.shape[2:]
        spec = layout.stacked(f'-{rest}', ((STAGE,), (), *shards))
        return jnp.zeros(shape, x.dtype, out_sharding=spec)

    return map_parameters(zeros, layers)


def zeros_outside(outside: Tree, layout: Layout) -> Tree:
    """Return zeros [Z, *shards, ...] to add up the gradients of parameters outside the layers."""
    entries = (STAGE,), *layout.mapped

    def zeros(declared: Parameter, x: jax.Array) -> jax.Array:
        spec = layout.stacked(dims_of_shard(declared, layout), entries)
        return jnp.zeros((*layout.sizes_of(entries), *x.shape), x.dtype, out_sharding=spec)

    return map_parameters(zeros, outside)


def joined(layers: Tree, outside: Tree, layout: Layout) -> nnx.State:
    """Return gradients in the shapes of the two functions above, for `zero.sum_over_data`."""
    count = len(layout.mapped)

    def join_layers(declared: Parameter, gradient: jax.Array) -> jax.Array:
        gradient = jnp.moveaxis(gradient, (0, 1), (count, count + 1))
        shape = *gradient.shape[:count], -1, *gradient.shape[count + 3 :]
        spec = layout.stacked(dims_of_shard(declared, layout), layout.mapped)
        return gradient.reshape(shape, out_sharding=spec)

    def join_stages(declared: Parameter, gradient: jax.Array) -> jax.Array:
        entries = shards_of(declared, layout)
        gradient = jnp.moveaxis(gradient, 0, count - 1)
        shape = *layout.sizes_of(entries), *gradient.shape[count + 1 :]
        spec = layout.stacked(dims_of_shard(declared, layout), entries)
        return gradient.reshape(shape, out_sharding=spec)

    return with_layers(map_parameters(join_stages, outside), map_parameters(join_layers, layers))


def _is_over(x: jax.Array, axis: str) -> bool:
    return axis in jax.typeof(x).sharding.spec


def slots(x: jax.Array | jax.ShapeDtypeStruct, count: int) -> jax.Array:
    """Return zeros [Z, slot, ...] for an array [Z, ...]."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    shape, spec = (x.shape[0], count, *x.shape[1:]), STAGES.like(sharding.spec, 'Z*->Z-*')
    return jnp.zeros(shape, x.dtype, out_sharding=spec)
