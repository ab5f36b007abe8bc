"""The documents of sequences whose tokens are on context shards, and the segments of BERT.

A document is a range of tokens, so the position of its first token tells it apart from the others,
and its other tokens follow. `first_RS` has this position for every token. A block of keys that ends
before a block of queries shares at most one document with it. This document contains the last keys
and the first queries. The number of both follows from `first_RS` of the queries, so nothing has to
be sent with the keys.

If attention is bidirectional or by heads, each shard gets the documents of all tokens of its
sequences instead.
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.model.kernels import Lengths
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.zigzag import in_order, in_shards


def shared(first_RS: jax.Array, stop_R: jax.Array, num_keys: int) -> Lengths:
    """Return how many of the first queries and of the last keys share a document.

    The keys are the `num_keys` that end before the position `stop_R`, which no query precedes.
    """
    queries = (first_RS < stop_R[:, None]).sum(1, dtype=jnp.int32)
    return queries, jnp.clip(stop_R - first_RS[:, 0], 0, num_keys)


def of_all_shards(document_BS: jax.Array, layout: Layout, *, ordered: bool) -> jax.Array:
    """Return each context shard's copy of its sequences' documents, int32 [B, shards x S].

    The tokens are `ordered`, or in the order of `zigzag.py`, as in `document_BS`.
    """
    batch, length = document_BS.shape
    shards = layout.num_shards('S')
    with jax.named_scope('documents'):
        ids = jax.reshard(document_BS, layout('Bs'))  # all-gather over context
        ids = in_order(ids, shards) if ordered else ids
        copies = jnp.broadcast_to(ids[:, None], (batch, shards, length))
        copies = jax.reshard(copies, layout('BS-'))
        return copies.reshape(batch, shards * length, out_sharding=layout('BS'))


def first_tokens(document_BS: jax.Array, layout: Layout) -> jax.Array:
    """Return the position of the first token of each token's document, int32 [B, S].

    `document_BS` numbers the documents of a batch, in the order of `zigzag.py`. All context shards
    gather these numbers, once per step.
    """
    length, shards = document_BS.shape[1], layout.num_shards('S')
    with jax.named_scope('documents'):
        document_BS = jax.reshard(document_BS, layout('Bs'))  # all-gather over context
        ids = in_order(document_BS, shards)
        place = jnp.arange(length, dtype=jnp.int32)[None]
        is_first = (ids != jnp.roll(ids, 1, axis=1)) | (place == 0)
        first = lax.cummax(jnp.where(is_first, place, 0), axis=1)
        return jax.reshard(in_shards(first, shards), layout('BS'))
