"""Split sequences within each shard's tokens, so that nothing moves between devices."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megajax.core.parallel.layout import Layout


def split_tokens(x: jax.Array, dims: str, num_parts: int, layout: Layout) -> list[jax.Array]:
    """Split x along its second dim, T or S, into parts with equal shares of each shard's tokens."""
    rows, length, *rest = x.shape
    shards = layout.num_shards('T')
    shape = rows, shards, num_parts, length // (shards * num_parts), *rest
    x = x.reshape(shape, out_sharding=layout(f'{dims[:2]}--{dims[2:]}'))
    of_part = rows, length // num_parts, *rest
    return [x[:, :, i].reshape(of_part, out_sharding=layout(dims)) for i in range(num_parts)]


def join_tokens(parts: Sequence[jax.Array], dims: str, layout: Layout) -> jax.Array:
    """Undo `split_tokens`."""
    rows, length, *rest = parts[0].shape
    shards = layout.num_shards('T')
    shape = rows, shards, length // shards, *rest
    spec = layout(f'{dims[:2]}-{dims[2:]}')
    x = jnp.stack([part.reshape(shape, out_sharding=spec) for part in parts], axis=2)
    return x.reshape(rows, length * len(parts), *rest, out_sharding=layout(dims))
