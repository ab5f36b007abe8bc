"""Bidirectional attention of sequences that are sharded over `context`, as in BERT.

Every query attends to the tokens of all shards, in their order. The keys and values of other shards
come as in causal attention (`context.py`), one block per shard. All scores of a block are computed,
so every shard has the same work, wherever a sequence has its padding. With segments, each block has
a mask. Each shard has the segments of all tokens of its sequences (`documents.py`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.model.context_exchange import How, Keys, Sums, merge
from megajax.core.model.dropout import WeightDropout
from megajax.core.model.kernels import KERNELS, Dropped
from megajax.core.model.passes import Passes, of_sequences, on_each_device
from megajax.core.parallel.layout import CONTEXT


@functools.cache
def passes(exchange: str, kernel: str, scale: float, rate: float) -> Passes:
    """Return the passes of a shard's tokens on all tokens of their sequences.

    `exchange` is `gather` or `ring`, `kernel` a key of KERNELS, and `rate` the dropout rate of
    weights. Attention stays within segments if the passes get the segments of the tokens of all
    shards, in the order of shards. Map them over context shards.
    """
    chosen = KERNELS[kernel].scaled(scale)
    how = How(chosen, is_ring=exchange == 'ring', rate=rate)
    of_shards = Passes(functools.partial(_attend, how), functools.partial(_gradients, how))
    return on_each_device(of_shards, of_sequences(chosen, causal=False, has_mask=False))


def _attend(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_RY: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return o [R, S, N, H] and, in fp32, the log-sum-exp [R, N, S] of a device's tokens."""
    blocks = _Blocks(how, q, segment_RY, key_R2)
    o, lse = how.kernel.forward(q, k, v, False, blocks.mask(0), dropped=blocks.dropped(0))
    keys, done, total = Keys(k, v, how.is_ring), [lse], (o.astype(jnp.float32), lse)
    for step in range(1, lax.axis_size(CONTEXT)):
        other = keys.of(step, done)
        part = how.kernel.forward(q, *other, False, blocks.mask(step), dropped=blocks.dropped(step))
        done.append(part[1])
        total = merge(total, part)
    o, lse = total
    return o.astype(q.dtype), lse


def _gradients(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    segment_RY: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv of a device's tokens."""
    blocks = _Blocks(how, q, segment_RY, key_R2)

    def of_block(step: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        given = q, k, v, o, lse, do, False, blocks.mask(step)
        return how.kernel.backward(*given, dropped=blocks.dropped(step))

    dq, dk, dv = of_block(0, k, v)
    keys, sums, done = Keys(k, v, how.is_ring), Sums(dk, dv, how.is_ring), [dq]
    dq = dq.astype(jnp.float32)
    for step in range(1, lax.axis_size(CONTEXT)):
        of_other = of_block(step, *keys.of(step, done))
        done.append(of_other[0])
        dq_2, dk_2, dv_2 = (x.astype(jnp.float32) for x in of_other)
        dq += dq_2
        sums.add(step, dk_2, dv_2)
    dk, dv = sums.collect()
    return dq.astype(q.dtype), dk, dv


class _Blocks:
    """The masks between a shard's queries and the keys of the shard some steps before it."""

    def __init__(
        self,
        how: How,
        q_RSNH: jax.Array,
        segment_RY: jax.Array | None,
        key_R2: jax.Array | None,
    ):
        self._length = q_RSNH.shape[1]
        self._segment_RY = segment_RY
        self._weights = None if key_R2 is None else WeightDropout.of(q_RSNH, key_R2, how.rate)

    def mask(self, step: int) -> jax.Array | None:
        """Return the mask [R, 1, S, Y] of attention within segments."""
        if self._segment_RY is None:
            return None
        segments = functools.partial(self._of_shard, self._segment_RY)
        return segments(0)[:, None, :, None] == segments(step)[:, None, None, :]

    def dropped(self, step: int) -> Dropped | None:
        """Return the dropout of a block's scores, or None without dropout."""
        if self._weights is None:
            return None
        return self._weights.at(self._weights.positions(), self._weights.positions(back=step))

    def _of_shard(self, x_RY: jax.Array, step: int) -> jax.Array:
        shard = (lax.axis_index(CONTEXT) - step) % lax.axis_size(CONTEXT)
        start = shard * self._length
        return lax.dynamic_slice_in_dim(x_RY, start, self._length, axis=1)
