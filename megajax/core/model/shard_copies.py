"""Replicated parameters that are applied along a sharded dim of an activation.

Examples are norms, biases after a row-parallel matmul, and the dense layer of BERT's masked-LM
head. Each shard computes a partial gradient of such a parameter. `copy_to_shards` gives each shard
its own copy, so partial gradients are accumulated over all microbatches and reduced only once per
step, as in Megatron.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.counts.declaration import Parameter
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout


def along_last(vector: jax.Array, x: jax.Array, dims: str, layout: Layout) -> jax.Array:
    """Reshape a vector so that it broadcasts against x, whose last two dims are `dims`.

    The vector is [D], or [T, D] with one copy for each shard of T.
    """
    if vector.ndim == 1:
        return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))
    sharded, last = dims[0], dims[1]
    copies, size = vector.shape
    length = x.shape[-2]
    spread = lax.broadcast_in_dim(
        vector, (copies, length // copies, size), (0, 2), out_sharding=layout(f'{sharded}-{last}')
    )
    spread = spread.reshape(length, size, out_sharding=layout(dims))
    return jnp.expand_dims(spread, tuple(range(x.ndim - 2)))


def copy_to_shards(params: Any, layout: Layout, *, encoder_only: bool = False) -> Any:
    """Give each shard its own copy of the parameters that are applied along a sharded dim.

    The copies are a new dim before the last one, or for the vision encoder before the first one;
    other parameters are unchanged. With `encoder_only`, the decoder is unchanged.
    """

    def copy(declared: Parameter, x: jax.Array) -> jax.Array:
        dims, is_of_encoder = copied_dims(declared, layout), declared.owner == 'encoder'
        if dims == declared.dims or (encoder_only and not is_of_encoder):
            return x
        at = 0 if is_of_encoder else x.ndim - 1
        shape = *x.shape[:at], layout.num_shards(declared.summed), *x.shape[at:]
        kept = *range(at), *range(at + 1, x.ndim + 1)
        return lax.broadcast_in_dim(x, shape, kept, out_sharding=layout(dims))

    return map_parameters(copy, params)


def add_copies(gradients: Any, layout: Layout) -> Any:
    """Turn the gradients of `copy_to_shards(params)` into the gradients of `params`.

    The sum over the data shards has already added the gradients of the vision encoder.
    """

    def add(declared: Parameter, gradient: jax.Array) -> jax.Array:
        if declared.owner == 'encoder' or copied_dims(declared, layout) == declared.dims:
            return gradient
        return gradient.sum(-2)  # all-reduce over model, once per step

    return map_parameters(add, gradients)


def dims_of_shard(declared: Parameter, layout: Layout) -> str:
    """Return the dims of a parameter's gradient on a data shard.

    They include the copies, and the dim of the data shard's own experts.
    """
    dims = copied_dims(declared, layout)
    return dims.replace('X', 'x') if layout.mesh_axes('X') else dims


def copied_dims(declared: Parameter, layout: Layout) -> str:
    """Return a parameter's dims with its copies: `LTD` for an `LD` applied along a sharded T."""
    # even with one shard, because the module then has only one form
    if declared.owner == 'encoder':
        return declared.summed + declared.dims
    if not declared.summed or layout.num_shards(declared.summed) == 1:
        return declared.dims
    return f'{declared.dims[:-1]}{declared.summed}{declared.dims[-1]}'
