"""Causal attention with a sliding window, of sequences that are sharded over `context`.

A window that is no longer than a chunk of `zigzag.py` reaches back into the previous chunk only.
The chunk before a shard's first chunk is on the previous shard, and the chunk before its second
chunk is on the next shard (for the last shard, it is the shard's own first chunk). Each shard
therefore sends the last keys and values of one chunk to each of its two neighbors: a halo exchange.

A block of queries attends to its own keys and to the halo before it, and both are merged by their
log-sum-exp. Query i attends to the keys after index i of the halo, so queries and keys are reversed
for a causal kernel. With documents, attention to a block's own keys has a mask, and only those last
keys of the halo count that are in the first query's document (`documents.py`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.counts.windows import block_in_chunk
from megajax.core.model.context_exchange import merge, pass_on
from megajax.core.model.documents import shared
from megajax.core.model.dropout import WeightDropout
from megajax.core.model.kernels import KERNELS, Dropped, Kernel, Lengths, same_document
from megajax.core.model.passes import Passes, of_sequences, on_each_device
from megajax.core.parallel.layout import CONTEXT
from megajax.core.parallel.zigzag import position_at

HIDDEN = 1e30  # a log-sum-exp with which every weight of a query is 0


@functools.cache
def passes(window: int, kernel: str, scale: float, rate: float) -> Passes:
    """Return the passes of each of a shard's tokens on the last `window` tokens up to it.

    `kernel` is a key of KERNELS, and `rate` the dropout rate of weights. The halos of keys and
    values are saved, so the backward pass sends only their gradients. Attention stays within
    documents if the passes get the position of the first token of each token's document. Map them
    over context shards.
    """
    chosen = KERNELS[kernel].scaled(scale)
    how = _How(window, chosen, is_flash=kernel == 'cudnn', rate=rate)
    whole = of_sequences(chosen, causal=True, window=window)

    def alone(*arrays: Any) -> tuple[jax.Array, ...]:
        halos = (x[:, : 2 * window] for x in arrays[1:3])
        return *whole.forward(*arrays), *halos

    def gradients_alone(*arrays: Any) -> tuple[jax.Array, ...]:
        return whole.backward(*arrays[:5], *arrays[7:])

    of_shards = Passes(functools.partial(_attend, how), functools.partial(_gradients, how))
    return on_each_device(of_shards, Passes(alone, gradients_alone), saved=2)


class _How(NamedTuple):
    """How a device computes attention."""

    window: int
    kernel: Kernel
    is_flash: bool
    rate: float  # dropout rate


class _Blocks:
    """The blocks in which a device computes attention; arrays have one entry per block.

    With cuDNN a block is a chunk. XLA's blocks are about as long as the window, so that their
    scores grow linearly with the sequence.
    """

    def __init__(
        self,
        how: _How,
        q: jax.Array,
        first_RS: jax.Array | None,
        key_R2: jax.Array | None,
    ):
        self.window, self._sequences, self._tokens = how.window, *q.shape[:2]
        self.length = block_in_chunk(how.window, self._tokens // 2, flash=how.is_flash)
        # A window as long as a block is plain causal attention.
        self.own_window = self.window if self.window < self.length else None
        self._dropout = None
        if key_R2 is not None:
            of_blocks = jnp.repeat(key_R2, self._tokens // self.length, axis=0)
            self._dropout = WeightDropout.of(q, of_blocks, how.rate)
        self._first = None if first_RS is None else self.of(first_RS)
        self.mask = None if self._first is None else same_document(self._first)

    def of(self, x: jax.Array) -> jax.Array:
        """Return an array of tokens [sequence, token, ...] as [block, token, ...]."""
        return x.reshape(-1, self.length, *x.shape[2:])

    def joined(self, x: jax.Array) -> jax.Array:
        """Return an array of blocks as an array of tokens."""
        return x.reshape(self._sequences, self._tokens, *x.shape[2:])

    def by_chunk(self, x: jax.Array) -> jax.Array:
        """Return an array of blocks as [sequence, chunk, block, ...]."""
        return x.reshape(self._sequences, 2, -1, *x.shape[1:])

    def halos(self, k: jax.Array, received: jax.Array) -> jax.Array:
        """Return the last keys before each block; `received` has the keys before each chunk."""
        ends = self.by_chunk(self.of(k)[:, -self.window :])
        of_chunks = received.reshape(self._sequences, 2, 1, self.window, *k.shape[2:])
        halos = jnp.concatenate([of_chunks, ends[:, :, :-1]], axis=2)
        return halos.reshape(-1, *halos.shape[3:])

    def visible(self) -> jax.Array:
        """Return whether each of a block's first `window` queries attends to a key of the halo.

        The result is [block, 1, query]. The last of these queries attends only to its own block,
        and nothing comes before the first chunk of the first shard.
        """
        count = self._tokens // self.length
        first = jnp.arange(count) == 0
        exists = jnp.tile(~(first & (lax.axis_index(CONTEXT) == 0)), self._sequences)
        sees = jnp.arange(self.window) < self.window - 1
        visible = exists[:, None, None] & sees[None, None, :]
        if self._first is None:
            return visible
        return visible & (self._first[:, : self.window] < self._starts()[:, None])[:, None]

    def lengths(self) -> Lengths | None:
        """Return the numbers of reversed queries and reversed keys that share each block's halo."""
        if self._first is None:
            return None
        _, keys = shared(self._first, self._starts(), self.window)
        return jnp.full_like(keys, self.window), keys

    def dropped(self) -> Dropped | None:
        """Return the dropout of the scores of each block's queries and own keys."""
        if self._dropout is None:
            return None
        place = self._starts()[:, None] + jnp.arange(self.length)[None]
        return self._dropout.at(place, place)

    def dropped_in_halos(self) -> Dropped | None:
        """Return the dropout of the scores of reversed queries and reversed keys of halos."""
        if self._dropout is None:
            return None
        start, place = self._starts()[:, None], jnp.arange(self.window)[None]
        return self._dropout.at(start + _turned(place), start - 1 - place)

    def _starts(self) -> jax.Array:
        """Return the position at which each block starts."""
        count = self._tokens // self.length
        place = lax.axis_index(CONTEXT) * self._tokens + jnp.arange(count) * self.length
        shards = lax.axis_size(CONTEXT)
        return jnp.tile(position_at(place, shards * self._tokens, shards), self._sequences)


def _attend(
    how: _How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_RS: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Return o, the log-sum-exp [R, N, S] in fp32, and the halos of a device's two chunks."""
    window, kernel, *_ = how
    blocks = _Blocks(how, q, first_RS, key_R2)
    received = _exchange(k, window), _exchange(v, window)
    halos = (blocks.halos(x, halo) for x, halo in zip((k, v), received, strict=True))
    of_blocks = q_own, *_ = [blocks.of(x) for x in (q, k, v)]
    o, lse = kernel.forward(
        *of_blocks, True, blocks.mask, window=blocks.own_window, dropped=blocks.dropped()
    )
    reversed_halos = (jnp.flip(x, 1) for x in halos)
    o_2, lse_2 = kernel.forward(
        _turned(q_own[:, :window]),
        *reversed_halos,
        True,
        lengths=blocks.lengths(),
        dropped=blocks.dropped_in_halos(),
    )
    lse_2 = jnp.where(blocks.visible(), _turned(lse_2, 2), -jnp.inf)
    own = o[:, :window].astype(jnp.float32), lse[:, :, :window]
    o_1, lse_1 = merge(own, (_turned(o_2), lse_2))
    o = jnp.concatenate([o_1.astype(o.dtype), o[:, window:]], axis=1)
    lse = jnp.concatenate([lse_1, lse[:, :, window:]], axis=2)
    lse_RSN = blocks.joined(jnp.moveaxis(lse, 1, 2))
    return blocks.joined(o), jnp.moveaxis(lse_RSN, 2, 1), *received


def _gradients(
    how: _How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    k_halo: jax.Array,
    v_halo: jax.Array,
    do: jax.Array,
    first_RS: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv of a device's tokens."""
    window, kernel, *_ = how
    blocks = _Blocks(how, q, first_RS, key_R2)
    halos = (jnp.flip(blocks.halos(x, halo), 1) for x, halo in ((k, k_halo), (v, v_halo)))
    q_own, k_own, v_own, o_own, do_own = (blocks.of(x) for x in (q, k, v, o, do))
    lse_own = jnp.moveaxis(blocks.of(jnp.moveaxis(lse, 1, 2)), 2, 1)
    lse_2 = jnp.where(blocks.visible(), lse_own[:, :, :window], HIDDEN)
    dq_2, dk_2, dv_2 = kernel.backward(
        _turned(q_own[:, :window]),
        *halos,
        _turned(o_own[:, :window]),
        _turned(lse_2, 2),
        _turned(do_own[:, :window]),
        True,
        lengths=blocks.lengths(),
        dropped=blocks.dropped_in_halos(),
    )
    of_own = q_own, k_own, v_own, o_own, lse_own, do_own
    dq, dk, dv = kernel.backward(
        *of_own, True, blocks.mask, window=blocks.own_window, dropped=blocks.dropped()
    )
    dq = dq.at[:, :window].set(_sum(dq[:, :window], _turned(dq_2)))
    sums = []
    for own, of_halos in ((dk, dk_2), (dv, dv_2)):
        by_chunk = blocks.by_chunk(jnp.flip(of_halos, 1))
        returned = _give_back(by_chunk[:, :, 0])
        ends = jnp.concatenate([by_chunk[:, :, 1:], returned[:, :, None]], axis=2)
        ends = ends.reshape(of_halos.shape)
        sums.append(own.at[:, -window:].set(_sum(own[:, -window:], ends)))
    dk, dv = map(blocks.joined, sums)
    return blocks.joined(dq), dk, dv


def _exchange(k: jax.Array, window: int) -> jax.Array:
    """Return the last keys before a shard's first chunk, and those before its second chunk."""
    first, second = (x[:, -window:] for x in jnp.split(k, 2, axis=1))
    before_first, before_second = pass_on(first), pass_on(second, -1)
    # The sequence's first chunk has nothing before it; `_Blocks.visible` hides what arrives there.
    return jnp.concatenate([before_first, jnp.where(_is_last(), first, before_second)], axis=1)


def _give_back(dk: jax.Array) -> jax.Array:
    """Return the gradients [sequence, chunk, token, ...] of the ends of a shard's chunks.

    `dk` are the gradients of the halos. They are sent back to the shards that sent the ends in
    `_exchange`.
    """
    of_first, of_second = dk[:, 0], dk[:, 1]
    first = jnp.where(_is_last(), of_second, pass_on(of_first, -1))
    second = jnp.where(lax.axis_index(CONTEXT) == 0, 0, pass_on(of_second))
    return jnp.stack([first, second], axis=1)


def _is_last() -> jax.Array:
    return lax.axis_index(CONTEXT) == lax.axis_size(CONTEXT) - 1


def _turned(x: jax.Array, dim: int = 1) -> jax.Array:
    """Reverse a dim without its last element, whose query attends to no key of the halo."""
    return jnp.roll(jnp.flip(x, dim), -1, dim)


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
