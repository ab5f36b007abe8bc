"""Attention by a pair of passes that save no scores, with or without attention sinks.

A sink is a learned logit of each query head in the softmax's denominator (gpt-oss, 2025). A sink
only adds to the log-sum-exp of a query. The output is scaled down accordingly, and the backward
pass of a kernel is correct if it gets this output and this log-sum-exp. Context shards add the sink
after their blocks of keys are merged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.core.model.kernels import Kernel, same_document
from megajax.core.model.per_device import Specs, per_device
from megajax.core.parallel.layout import UNSHARDED

Arrays = tuple[jax.Array, ...]


class Passes(NamedTuple):
    """The two passes, of arrays that are sharded on the current mesh."""

    # (q, k, v, segments or None, keys or None) -> o_RSNH, lse_RNS and others to save
    forward: Callable[..., Arrays]
    # (q, k, v, o, lse, others, do, segments or None, keys or None) -> dq, dk, dv
    backward: Callable[..., Arrays]


def of_sequences(
    kernel: Kernel, *, causal: bool, window: int | None = None, has_mask: bool = True
) -> Passes:
    """Return a kernel's passes for whole sequences; with a mask, they stay within segments."""

    def within(kernel_pass: Callable[..., Arrays]) -> Callable[..., Arrays]:
        def apply(*arrays: Any) -> Arrays:
            *arrays_of_kernel, segment_RS, _ = arrays
            mask = same_document(segment_RS) if has_mask else None
            return kernel_pass(*arrays_of_kernel, causal, mask, window=window)

        return apply

    return Passes(within(kernel.forward), within(kernel.backward))


def on_each_device(passes: Passes, unmapped: Passes | None = None, *, saved: int = 0) -> Passes:
    """Return passes that apply `passes` to each device's part of the arrays.

    `passes` may communicate along a mapped dim; if none is mapped, `unmapped` is applied instead.
    After o and the log-sum-exp, the forward pass returns `saved` arrays that are sharded like k and
    v.
    """

    def like_inputs(specs: Specs) -> Specs:
        return specs[0], UNSHARDED.like(specs[0], '*RSNH->*RN-'), *specs[1 : 1 + saved]

    forward, backward = unmapped or (None, None)
    return Passes(
        per_device(passes.forward, like_inputs, forward),
        per_device(passes.backward, lambda specs: specs[:3], backward),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_by(
    passes: Passes,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    sinks_N: jax.Array | None = None,
    key_R2: jax.Array | None = None,
) -> jax.Array:
    """Return attention o_RSNH, sharded like q; within segments and with dropout if given.

    `key_R2` has the raw dropout key of each sequence. The backward pass recomputes the scores from
    the log-sum-exp of each query, which takes 4 bytes per query and head.
    """
    return _forward(passes, q_RSNH, k_RSKH, v_RSKH, segment_RS, sinks_N, key_R2)[0]


class _Saved(NamedTuple):
    arrays: Arrays  # q, k, v, o, lse and others
    beside: tuple[jax.Array | None, jax.Array | None]  # segments and keys
    sinks_N: jax.Array | None


def _forward(
    passes: Passes,
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    sinks_N: jax.Array | None,
    key_R2: jax.Array | None,
) -> tuple[jax.Array, _Saved]:
    qkv, beside = (q_RSNH, k_RSKH, v_RSKH), (segment_RS, key_R2)
    o_RSNH, lse_RNS, *others = passes.forward(*qkv, *beside)
    if sinks_N is not None:
        own_RNS, lse_RNS = lse_RNS, jnp.logaddexp(lse_RNS, jnp.expand_dims(sinks_N, (0, 2)))
        share_RSN1 = jnp.moveaxis(jnp.exp(own_RNS - lse_RNS), 1, 2)[..., None]
        o_RSNH = (o_RSNH.astype(jnp.float32) * share_RSN1).astype(o_RSNH.dtype)
    return o_RSNH, _Saved((*qkv, o_RSNH, lse_RNS, *others), beside, sinks_N)


def _backward(passes: Passes, saved: _Saved, do_RSNH: jax.Array) -> tuple[jax.Array | None, ...]:
    arrays, beside, sinks_N = saved
    gradients = passes.backward(*arrays, do_RSNH, *beside)
    if sinks_N is None:
        return *gradients, None, None, None
    o_RSNH, lse_RNS = arrays[3:5]
    weight_RNS = jnp.exp(jnp.expand_dims(sinks_N, (0, 2)) - lse_RNS)
    dlse_RSN = (do_RSNH.astype(jnp.float32) * o_RSNH.astype(jnp.float32)).sum(-1)
    dsinks_N = -(weight_RNS * jnp.moveaxis(dlse_RSN, 1, 2)).sum((0, 2))
    return *gradients, None, dsinks_N, None


attend_by.defvjp(_forward, _backward)
