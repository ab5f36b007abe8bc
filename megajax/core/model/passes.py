"""Attention by a pair of passes that save no scores, with or without attention sinks.

A sink is a learned logit of each query head in the softmax's denominator (gpt-oss, 2025). It only
adds to the log-sum-exp of a query: the output shrinks by what the log-sum-exp grows, and the
backward pass of a kernel is right if it gets both. Context shards add it after their blocks of keys
are merged.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]


class Passes(NamedTuple):
    """The two passes, of arrays that are sharded on the current mesh."""

    forward: Callable[..., Arrays]  # (q, k, v[, segments]) -> o_RSNH, lse_RNS and others to save
    backward: Callable[..., Arrays]  # (q, k, v, o, lse, others, do[, segments]) -> dq, dk, dv


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_by(
    passes: Passes,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attention o_RSNH, sharded like q; within segments if they are given.

    The backward pass computes the scores again from the result and the log-sum-exp of each query, 4
    bytes per query and head.
    """
    return _forward(passes, q_RSNH, k_RSKH, v_RSKH, segment_RS, sinks_N)[0]


class _Saved(NamedTuple):
    arrays: Arrays  # q, k, v, o, lse and others
    segment_RS: jax.Array | None
    sinks_N: jax.Array | None


def _forward(
    passes: Passes,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    sinks_N: jax.Array | None,
) -> tuple[jax.Array, _Saved]:
    qkv = q_RSNH, k_RSKH, v_RSKH
    o_RSNH, lse_RNS, *others = passes.forward(*qkv, *_given(segment_RS))
    if sinks_N is not None:
        own_RNS, lse_RNS = lse_RNS, jnp.logaddexp(lse_RNS, jnp.expand_dims(sinks_N, (0, 2)))
        share_RSN1 = jnp.moveaxis(jnp.exp(own_RNS - lse_RNS), 1, 2)[..., None]
        o_RSNH = (o_RSNH.astype(jnp.float32) * share_RSN1).astype(o_RSNH.dtype)
    return o_RSNH, _Saved((*qkv, o_RSNH, lse_RNS, *others), segment_RS, sinks_N)


def _backward(passes: Passes, saved: _Saved, do_RSNH: jax.Array) -> tuple[jax.Array | None, ...]:
    arrays, segment_RS, sinks_N = saved
    gradients = passes.backward(*arrays, do_RSNH, *_given(segment_RS))
    if sinks_N is None:
        return *gradients, None, None
    o_RSNH, lse_RNS = arrays[3:5]
    weight_RNS = jnp.exp(jnp.expand_dims(sinks_N, (0, 2)) - lse_RNS)
    dlse_RSN = (do_RSNH.astype(jnp.float32) * o_RSNH.astype(jnp.float32)).sum(-1)
    return *gradients, None, -(weight_RNS * jnp.moveaxis(dlse_RSN, 1, 2)).sum((0, 2))


attend_by.defvjp(_forward, _backward)


def _given(x: jax.Array | None) -> Arrays:
    return () if x is None else (x,)
