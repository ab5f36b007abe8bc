"""Replicated parameters that act on the last dim of an activation: weights and biases of norms, biases after a
row-parallel product, and the dense layer of BERT's masked-LM head.

Where the activation is sharded over `model`, each shard makes a part of the parameter's gradient. `one_copy_per_shard` gives each shard
its own copy, so that the parts are added up over all microbatches before they are reduced, once a step, as Megatron does.
D the vector's size, T shards of `model`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.config import Config
from megajax.parallel import layout
from megajax.parallel.layout import Layout


def along_last(vector: jax.Array, x: jax.Array) -> jax.Array:
    """The vector [D], or its copies [T, D], in a shape that broadcasts against x [..., D]."""
    if vector.ndim == 1:
        return jnp.expand_dims(vector, tuple(range(x.ndim - 1)))
    dim = layout.model_dim(x)
    copies, size = vector.shape
    spread = lax.broadcast_in_dim(vector, (copies, x.shape[dim] // copies, size), (0, 2), out_sharding=Layout.copies_TSD)
    spread = spread.reshape(x.shape[dim], size, out_sharding=Layout.copies_TD)
    return jnp.expand_dims(spread, tuple(i for i in range(x.ndim - 1) if i != dim))


def one_copy_per_shard(params: Any, config: Config) -> Any:
    """The parameters, with a dim [..., T, D] in those that act on an activation sharded over `model`."""
    placed, shards = Layout.of(config), config.mesh.model

    def copy(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        if not _acts_on_shards(path, placed):
            return x
        return lax.broadcast_in_dim(x, (*x.shape[:-1], shards, x.shape[-1]), (*range(x.ndim - 1), x.ndim), out_sharding=layout.copies(x))

    return jax.tree_util.tree_map_with_path(copy, params)


def add_copies(gradients: Any, params: Any) -> Any:
    """The gradients of `one_copy_per_shard(params)` as those of `params`."""
    return jax.tree.map(lambda g, p: g if g.shape == p.shape else g.sum(-2), gradients, params)  # all-reduce over model, once a step


def _acts_on_shards(path: tuple[Any, ...], placed: Layout) -> bool:
    names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    if 'query_norm' in names or 'key_norm' in names:
        return placed.model_size > 1  # of heads
    on_residual_stream = any(name.endswith('norm') for name in names) or names[-2:] in (['out', 'bias'], ['down', 'bias'])
    on_residual_stream |= names[:2] == ['masked_head', 'dense']
    return on_residual_stream and placed.sequence_parallel
