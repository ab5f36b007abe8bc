"""Causal attention of sequences that are sharded over `context`, in the order of `zigzag.py`.

Context parallelism: each shard has its own queries, and attends to the keys and values of every
shard: all at once after an all-gather (as in Llama 3, 2024), or one shard at a time, passed around
a ring (Liu et al., 2023). Blocks are merged by their log-sum-exp. Whatever shard the keys come
from, half of the scores between the two chunks of queries and of keys are needed, and only that
half is computed.

With documents, attention to a shard's own keys has a mask. A chunk of queries shares at most one
document with keys of another shard (`documents.py`), so a number of queries and a number of keys
replace the mask. The kernels count keys from the first one, so chunks of keys are reversed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.model.context_exchange import How, Keys, Pair, Sums, by_token, merge
from megajax.core.model.documents import shared
from megajax.core.model.dropout import WeightDropout
from megajax.core.model.kernels import KERNELS, Dropped, Lengths, same_document
from megajax.core.model.passes import Passes, of_sequences, on_each_device
from megajax.core.parallel.layout import CONTEXT


@functools.cache
def passes(exchange: str, kernel: str, scale: float, rate: float) -> Passes:
    """Return the passes of a shard's tokens on all earlier tokens of their sequences.

    `exchange` is `gather` or `ring`, `kernel` a key of KERNELS, and `rate` the dropout rate of
    weights. Attention stays within documents if the passes get the position of the first token of
    each token's document. Map them over context shards.
    """
    chosen = KERNELS[kernel].scaled(scale)
    how = How(chosen, is_ring=exchange == 'ring', rate=rate)
    of_shards = Passes(functools.partial(_attend, how), functools.partial(_gradients, how))
    return on_each_device(of_shards, of_sequences(chosen, causal=True))


def _attend(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first_RS: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Return o [R, S, N, H] and, in fp32, the log-sum-exp [R, N, S] of a device's tokens."""
    rows, rank, shards = len(q), lax.axis_index(CONTEXT), lax.axis_size(CONTEXT)
    kernel, ring, rate = how
    documents, dropout = _Documents(first_RS), _Dropout(key_R2, rate, q)
    o, lse = kernel.forward(q, k, v, True, documents.mask, dropped=dropout.own())
    first, second = zip(_halves(o.astype(jnp.float32), 1), _halves(lse, 2), strict=True)
    keys, done = Keys(documents.turned(k), documents.turned(v), ring), [lse]
    for step in range(1, shards):
        k_2, v_2 = keys.of(step, done)
        is_earlier = step <= rank  # these keys come from a shard of a lower index
        o_2, lse_2 = kernel.forward(
            _both(q, is_earlier),
            _of_keys(k_2, is_earlier),
            _of_keys(v_2, is_earlier),
            False,
            lengths=documents.lengths(step),
            dropped=dropout.of(step, documents),
        )
        done.append(lse_2)
        # The second half of the results is for the first chunk of queries if `is_earlier`, else for
        # the second chunk.
        lowest = jnp.full_like(lse_2[rows:], -jnp.inf)
        second = merge(second, (o_2[:rows], lse_2[:rows]))
        first = merge(first, (o_2[rows:], jnp.where(is_earlier, lse_2[rows:], lowest)))
        second = merge(second, (o_2[rows:], jnp.where(is_earlier, lowest, lse_2[rows:])))
    o = jnp.concatenate([first[0], second[0]], axis=1)
    return o.astype(q.dtype), jnp.concatenate([first[1], second[1]], axis=2)


def _gradients(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    first_RS: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv of a device's tokens."""
    rows, rank, shards = len(q), lax.axis_index(CONTEXT), lax.axis_size(CONTEXT)
    kernel, ring, rate = how
    documents, dropout = _Documents(first_RS), _Dropout(key_R2, rate, q)
    own = documents.mask, dropout.own()
    dq, dk, dv = kernel.backward(q, k, v, o, lse, do, True, own[0], dropped=own[1])
    k, v, dk, dv = map(documents.turned, (k, v, dk, dv))
    keys, sums, done = Keys(k, v, ring), Sums(dk, dv, ring), [dq]
    dq = dq.astype(jnp.float32)
    for step in range(1, shards):
        k_2, v_2 = keys.of(step, done)
        is_earlier = step <= rank
        of_queries = (_both(x, is_earlier) for x in (o, by_token(lse), do))
        o_2, lse_2, do_2 = of_queries
        dq_2, dk_2, dv_2 = (
            x.astype(jnp.float32)
            for x in kernel.backward(
                _both(q, is_earlier),
                _of_keys(k_2, is_earlier),
                _of_keys(v_2, is_earlier),
                o_2,
                jnp.moveaxis(lse_2, 2, 1),
                do_2,
                False,
                lengths=documents.lengths(step),
                dropped=dropout.of(step, documents),
            )
        )
        done.append(dq_2)
        dq += _to_chunks(jnp.zeros_like(dq_2[:rows]), dq_2[:rows], dq_2[rows:], is_earlier)
        zero = jnp.zeros_like(dk_2[:rows])
        dk_2, dv_2 = (_to_chunks(x[:rows], zero, x[rows:], is_earlier) for x in (dk_2, dv_2))
        sums.add(step, dk_2, dv_2)
    dk, dv = map(documents.turned, sums.collect())
    return dq.astype(q.dtype), dk, dv


class _Documents:
    """The documents of a shard's tokens, if attention stays within documents."""

    def __init__(self, first_RS: jax.Array | None = None):
        self._first_RS = first_RS
        self.mask = None if first_RS is None else same_document(first_RS)

    def turned(self, x_RSKH: jax.Array) -> jax.Array:
        """Return keys, or gradients of keys, with each of their two chunks in reverse."""
        if self._first_RS is None:
            return x_RSKH
        return jnp.concatenate([jnp.flip(chunk, 1) for chunk in _halves(x_RSKH, 1)], axis=1)

    def lengths(self, step: int) -> Lengths | None:
        """Return the lengths of the sequences of `_both` and `_of_keys` for this step."""
        if self._first_RS is None:
            return None
        rank, shards = lax.axis_index(CONTEXT), lax.axis_size(CONTEXT)
        rows, chunk = len(self._first_RS), self._first_RS.shape[1] // 2
        shard, is_earlier = (rank - step) % shards, step <= rank
        # The positions at which the two chunks of keys end.
        first, second = (shard + 1) * chunk, (2 * shards - shard) * chunk
        stop_R = jnp.repeat(jnp.stack([first, jnp.where(is_earlier, first, second)]), rows)
        return shared(_both(self._first_RS, is_earlier), stop_R, chunk)


class _Dropout:
    """Dropout of the weights of a shard's queries, if there is any."""

    def __init__(self, key_R2: jax.Array | None, rate: float, q_RSNH: jax.Array):
        self._weights = None if key_R2 is None else WeightDropout.of(q_RSNH, key_R2, rate)

    def own(self) -> Dropped | None:
        """Return the dropout of the scores with the shard's own keys."""
        if self._weights is None:
            return None
        position_RS = self._weights.positions()
        return self._weights.at(position_RS, position_RS)

    def of(self, step: int, documents: _Documents) -> Dropped | None:
        """Return the dropout of the scores of `_both` and `_of_keys` in this step."""
        if self._weights is None:
            return None
        is_earlier = step <= lax.axis_index(CONTEXT)
        key_RS = documents.turned(self._weights.positions(back=step))
        query_RS = self._weights.positions()
        return self._weights.at(_both(query_RS, is_earlier), _of_keys(key_RS, is_earlier))


def _both(x: jax.Array, is_earlier: jax.Array) -> jax.Array:
    """Return the second chunk of queries, then the first or, unless `is_earlier`, the second again.

    With keys of an earlier shard, both chunks of queries attend to the first chunk of keys. With
    keys of a later shard, the second chunk of queries attends to both chunks of keys.
    """
    first, second = _halves(x, 1)
    return jnp.concatenate([second, jnp.where(is_earlier, first, second)])


def _of_keys(x: jax.Array, is_earlier: jax.Array) -> jax.Array:
    """Return the chunks of keys that belong to the results of `_both`."""
    first, second = _halves(x, 1)
    return jnp.concatenate([first, jnp.where(is_earlier, first, second)])


def _to_chunks(
    first: jax.Array, second: jax.Array, either: jax.Array, is_earlier: jax.Array
) -> jax.Array:
    """Join the chunks; `either` is added to the first if `is_earlier`, otherwise to the second."""
    of_first = jnp.where(is_earlier, either, 0)
    return jnp.concatenate([first + of_first, second + (either - of_first)], 1)


def _halves(x: jax.Array, dim: int) -> Pair:
    first, second = jnp.split(x, 2, axis=dim)
    return first, second
