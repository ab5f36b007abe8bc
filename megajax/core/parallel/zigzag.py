"""The order of a sequence's tokens on its context shards.

A sequence is cut into twice as many chunks as there are shards. Shard r has chunk r counted from
the start and chunk r counted from the end, so every shard has the same work in causal attention.
"""

from typing import Any

import jax
import jax.numpy as jnp


def position_at(place: Any, length: int, shards: int) -> Any:
    """Return the position, in its sequence, of the token at a place.

    Both are numbers or arrays. The places of a shard are contiguous. `length` is the number of
    tokens of the sequence.
    """
    chunk = length // (2 * shards)
    shard, offset = place // (2 * chunk), place % (2 * chunk)
    is_second = offset // chunk
    return (shard + is_second * (2 * shards - 1 - 2 * shard)) * chunk + offset % chunk


def in_order(x: jax.Array, shards: int) -> jax.Array:
    """Return an array [B, S, ...] of unsharded tokens in order, given their shards' tokens."""
    chunks = x.reshape(len(x), shards, 2, -1, *x.shape[2:])
    ordered = jnp.concatenate([chunks[:, :, 0], jnp.flip(chunks[:, :, 1], 1)], axis=1)
    return ordered.reshape(x.shape)


def in_shards(x: jax.Array, shards: int) -> jax.Array:
    """Return an array [B, S, ...] of unsharded tokens, in order, in the order of shards."""
    chunks = x.reshape(len(x), 2, shards, -1, *x.shape[2:])
    by_shard = jnp.stack([chunks[:, 0], jnp.flip(chunks[:, 1], 1)], axis=2)
    return by_shard.reshape(x.shape)
