"""Attention by heads, for sequences that are sharded over `context`.

Ulysses (Jacobs et al., 2023): all-to-alls of queries, keys and values give each shard all tokens
for a part of the heads, and an all-to-all of the output returns the tokens to their shards. In
between, attention is computed as on one device, with any mask, after the tokens are put from the
order of `zigzag.py` into their own order.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.model.dropout import WeightDropout
from megajax.core.model.kernels import KERNELS, Dropped, same_document
from megajax.core.model.passes import Passes, attend_by, of_sequences, on_each_device
from megajax.core.model.per_device import per_device
from megajax.core.parallel.layout import CONTEXT, UNSHARDED, Layout
from megajax.core.parallel.zigzag import in_order, in_shards

Exchange = Callable[[jax.Array], jax.Array]


class Masks(NamedTuple):
    """The keys that a query attends to, apart from documents."""

    causal: bool
    window: int | None


def attend_by_heads(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    masks: Masks,
    layout: Layout,
    kernel: str,
    scale: float,
    document_RY: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    key_R2: jax.Array | None = None,
    rate: float = 0.0,
) -> jax.Array:
    """Return attention o_RSNH of a shard's tokens on the tokens of their sequences.

    `kernel` is a key of KERNELS. With `document_RY`, the documents of all tokens of the sequences
    in order, attention stays within documents. With `key_R2`, the raw dropout key of each sequence,
    weights have dropout. Map this function over context shards.
    """
    shards = jax.typeof(q_RSNH).sharding.mesh.shape[CONTEXT]
    to_heads, to_tokens = _exchanges(shards)
    passes = _passes(masks, kernel, scale, rate)
    own = None if sinks_N is None else _own_heads(sinks_N, q_RSNH, shards, layout)
    heads = map(to_heads, (q_RSNH, k_RSKH, v_RSKH))
    return to_tokens(attend_by(passes, *heads, document_RY, own, key_R2))


@functools.cache
def _passes(masks: Masks, kernel: str, scale: float, rate: float) -> Passes:
    passes, (causal, window) = KERNELS[kernel].scaled(scale), masks

    def forward(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        document_RY: jax.Array | None,
        key_R2: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        mask, dropped = same_document(document_RY), _dropped(q, key_R2, rate)
        return passes.forward(q, k, v, causal, mask, window=window, dropped=dropped)

    def backward(*arrays: Any) -> tuple[jax.Array, ...]:
        *saved, document_RY, key_R2 = arrays
        mask, dropped = same_document(document_RY), _dropped(saved[0], key_R2, rate)
        return passes.backward(*saved, causal, mask, window=window, dropped=dropped)

    whole = of_sequences(passes, causal=causal, has_mask=False)
    return on_each_device(Passes(forward, backward), whole)


def _dropped(q_RYNH: jax.Array, key_R2: jax.Array | None, rate: float) -> Dropped | None:
    """Return the dropout of all scores of a device's heads, or None without dropout."""
    if key_R2 is None:
        return None
    rows, length, heads, _ = q_RYNH.shape
    part = lax.axis_index('model') * lax.axis_size(CONTEXT) + lax.axis_index(CONTEXT)
    dropout = WeightDropout(rate, key_R2, part * heads + jnp.arange(heads), length)
    place_RY = jnp.tile(jnp.arange(length)[None], (rows, 1))
    return dropout.at(place_RY, place_RY)


@functools.cache
def _exchanges(shards: int) -> tuple[Exchange, Exchange]:
    """Return two functions of x_RSNH that exchange tokens for heads, and heads for tokens.

    The gradient of each function is the other one.
    """

    def gather_tokens(x: jax.Array) -> tuple[jax.Array]:
        x = lax.all_to_all(x, CONTEXT, 2, 1, tiled=True)  # all-to-all over context
        return (in_order(x, shards),)

    def gather_heads(x: jax.Array) -> tuple[jax.Array]:
        x = in_shards(x, shards)
        return (lax.all_to_all(x, CONTEXT, 1, 2, tiled=True),)  # all-to-all over context

    def tokens_alone(x: jax.Array) -> tuple[jax.Array]:
        return (x.reshape(len(x), -1, x.shape[2] // shards, x.shape[3]),)

    def heads_alone(x: jax.Array) -> tuple[jax.Array]:
        return (x.reshape(len(x), x.shape[1] // shards, -1, x.shape[3]),)

    on_heads = per_device(gather_tokens, lambda specs: specs, tokens_alone)
    on_tokens = per_device(gather_heads, lambda specs: specs, heads_alone)

    def exchange(there: Callable[..., Any], back: Callable[..., Any]) -> Exchange:
        apply = jax.custom_vjp(lambda x: there(x)[0])
        apply.defvjp(lambda x: (there(x)[0], None), lambda _, dx: back(dx))
        return apply

    return exchange(on_heads, on_tokens), exchange(on_tokens, on_heads)


def _own_heads(x_N: jax.Array, q_RSNH: jax.Array, shards: int, layout: Layout) -> jax.Array:
    """Return the elements of x that belong to a context shard's part of the heads."""
    of_model = layout.num_shards('N')

    def is_own(_: jax.Array) -> tuple[jax.Array]:
        return (jnp.arange(shards) == lax.axis_index(CONTEXT),)

    def alone(_: jax.Array) -> tuple[jax.Array]:
        return (jnp.zeros(shards, bool),)

    find = per_device(is_own, lambda specs: (UNSHARDED.like(specs[0], '*RSNH->*-'),), alone)
    (own,) = find(lax.stop_gradient(q_RSNH))
    parts = x_N.reshape(of_model, shards, -1, out_sharding=layout('N--'))
    of_shard = jnp.where(jnp.expand_dims(own, (0, 2)), parts, 0).sum(1)
    return of_shard.reshape(-1, out_sharding=layout('N'))
