"""The order of a sequence's tokens on its context shards.

A sequence is cut into twice as many chunks as there are shards. Shard r has chunk r and, counted
from the end, chunk r again, so causal attention is the same work for every shard.
"""

from typing import Any


def position_at(place: Any, length: int, shards: int) -> Any:
    """Return the position in its sequence of the token at a place, both arrays or numbers.

    The shards have neighboring places. `length` is the number of tokens of the sequence.
    """
    chunk = length // (2 * shards)
    shard, offset = place // (2 * chunk), place % (2 * chunk)
    is_second = offset // chunk
    return (shard + is_second * (2 * shards - 1 - 2 * shard)) * chunk + offset % chunk
