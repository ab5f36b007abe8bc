"""Restore a replicated array by reading each part of it in one process.

Otherwise, each data shard would read all weights that it shares with the other data shards.
"""

import math
from typing import Any

import jax

from megajax.core.parallel.layout import spread
from megajax.runtime.checkpoint.orbax_manager import SMALLEST_SLICE


def to_read(abstract: Any) -> Any:
    """Return an abstract tree with the shardings with which to read it, before `as_stored`.

    Replicas share the read of an array as they share its save (`SMALLEST_SLICE`): on the same mesh,
    each chunk that was written is read once. From a different mesh, the chunks may be larger, and a
    process with several devices would read a chunk once for each of them; it reads alone.
    """
    if not one_device_each():
        return abstract

    def shared(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = x.sharding
        spec = spread(sharding.spec, x.shape, sharding.mesh.shape)
        part = sharding.update(spec=spec)
        is_small = math.prod(part.shard_shape(x.shape)) * x.dtype.itemsize < SMALLEST_SLICE
        return x if is_small else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=part)

    return jax.tree.map(shared, abstract)


def one_device_each() -> bool:
    """Whether the run has several processes with one device each."""
    return jax.process_count() > 1 and jax.local_device_count() == 1


def as_stored(tree: Any, abstract: Any) -> Any:
    """Return arrays that were read as `to_read(abstract)` with their own shardings; consume them.

    They are gathered one after the other, so only one array at a time exists more than once.
    """

    def gathered(x: jax.Array, stored: jax.ShapeDtypeStruct) -> jax.Array:
        if x.sharding == stored.sharding:
            return x
        result = jax.block_until_ready(jax.reshard(x, stored.sharding))  # all-gather
        x.delete()
        return result

    return jax.tree.map(gathered, tree, abstract)
