"""The shards of images: each device of a tensor-parallel group has different images."""

from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.parallel.layout import Layout


def over_images(function: Any, layout: Layout) -> Any:
    """Map a function of copies and of images over the shards of the images.

    The mapped function takes a module with copies, and arrays [sequences, slots, ...]; `function`
    gets the module of one shard, and its arrays [images, ...]. Empty slots at the end make all
    shards equal.
    """
    shards = layout.num_shards('I')

    def sharded(x: jax.Array) -> jax.Array:
        rest = x.shape[2:]
        x = x.reshape(-1, *rest, out_sharding=layout('-' * (1 + len(rest))))
        x = jnp.pad(x, ((0, -len(x) % shards), *((0, 0) for _ in rest)))
        spec = layout('I' + '-' * (1 + len(rest)))
        return x.reshape(shards, -1, *rest, out_sharding=spec)

    def mapped(copies: Any, *arrays: Any) -> Any:
        return jax.vmap(function)(copies, *jax.tree.map(sharded, arrays))

    return mapped
