"""The order of a sequence's tokens on its context shards.

A sequence is cut into twice as many chunks as there are shards. Shard r has chunk r counted from
the start and chunk r counted from the end, so every shard has the same work in causal attention.
"""

from typing import Any


def position_at(place: Any, length: int, shards: int) -> Any:
    """Return the position, in its sequence, of the token at a place.

    Both are numbers or arrays. The places of a shard are contiguous. `length` is the number of
    tokens of the sequence.
    """
    chunk = length // (2 * shards)
    shard, offset = place // (2 * chunk), place % (2 * chunk)
    is_second = offset // chunk
    return (shard + is_second * (2 * shards - 1 - 2 * shard)) * chunk + offset % chunk
