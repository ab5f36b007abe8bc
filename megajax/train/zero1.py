"""ZeRO stage 1 (Rajbhandari et al., 2020), Megatron's distributed optimizer: `optim.shard`.

Between steps each data shard stores its part of every matrix, in fp32, and of AdamW's moments. A
step gathers the matrices once, in the compute dtype, reduce-scatters their gradients in fp32 to the
part that each data shard updates, and updates it: per parameter 6 bytes on every device and 12
divided among the data shards, instead of 16. Tables and vectors are few and stay replicated.
"""

from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from megajax.counts.parameters import Parameter
from megajax.model.parameters import cast_matrices, map_parameters
from megajax.model.shard_copies import copied_dims
from megajax.parallel.layout import Layout


def shard_over_data(params: Any, layout: Layout) -> Any:
    """Return the parameters with their placement between steps."""

    def place(declared: Parameter, x: jax.Array) -> jax.Array:
        return jax.reshard(x, layout(declared.dims, at_rest=True)) if declared.is_matrix else x

    return map_parameters(place, params) if layout.at_rest else params


def gather_over_data(params: Any, dtype: DTypeLike, layout: Layout) -> Any:
    """Return the parameters as a step uses them: gathered over `data`, in the compute dtype.

    Each matrix is replicated over the data shards.
    """
    if not layout.at_rest:
        return params
    with jax.named_scope('parameters'):
        return cast_matrices(params, dtype, layout)  # all-gather over data


def sum_over_data(gradients: Any, layout: Layout) -> Any:
    """Return the sum of gradients [data shard, ...], each with the placement of its parameter.

    This is an all-reduce over `data`, or a reduce-scatter if the parameter is sharded over it.
    """

    def add(declared: Parameter, gradient: jax.Array) -> jax.Array:
        dims = copied_dims(declared, layout)
        spec = layout(dims, at_rest=declared.is_matrix)
        return lax.reduce_sum(gradient, (0,), out_sharding=spec)

    return map_parameters(add, gradients)
