"""ZeRO stage 1 (Rajbhandari et al., 2020), as Megatron's distributed optimizer has it: `optim.shard`.

Between steps each data shard keeps its part of every matrix, in fp32, and of AdamW's moments. A step gathers the matrices once, in the
dtype of the computation, reduces their gradients in fp32 to the part that each data shard updates, and updates it: per parameter 6 bytes
on every device and 12 shared by the data shards, instead of 16. Vectors and learned positions are few and stay whole.
"""

from typing import Any

import jax
from jax import lax

from megajax.config import Config
from megajax.model.main_gradient import cast_matrices, is_matrix
from megajax.parallel import layout


def shard_over_data(params: Any, config: Config) -> Any:
    """The parameters as they lie between steps."""
    if not config.optim.shard:
        return params

    def place(path: tuple[Any, ...], p: jax.Array) -> jax.Array:
        return jax.reshard(p, layout.sharded_over_data(p, config.mesh.data)) if is_matrix(path) else p

    return jax.tree_util.tree_map_with_path(place, params)


def gather_over_data(params: Any, config: Config) -> Any:
    """The parameters as a step computes with them: each matrix whole on every data shard, in the dtype of the computation."""
    if not config.optim.shard:
        return params
    with jax.named_scope('parameters'):
        return cast_matrices(params, config.train.dtype)  # all-gather over data


def sum_over_data(gradients: Any, params: Any) -> Any:
    """The sum of gradients [data shard, ...], each where its parameter lies: all-reduce over data, reduce-scatter where that is sharded."""

    def add(g: jax.Array, p: jax.Array) -> jax.Array:
        one_copy = g.shape[1:] == p.shape  # see `model/vector.py`
        return lax.reduce_sum(g, (0,), out_sharding=jax.typeof(p).sharding.spec if one_copy else layout.copies(p))

    return jax.tree.map(add, gradients, params)
