"""cuDNN's flash attention, on the heads and sequences of each GPU."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from megajax.core.counts.flash import missing_for_flash
from megajax.core.hardware.targets import capability_of, is_nvidia
from megajax.core.model.kernels import KERNELS
from megajax.core.model.per_device import per_device
from megajax.core.parallel.layout import UNSHARDED

logger = logging.getLogger(__name__)


@functools.cache
def can_flash(device: Any, dtype: str, head_dim: int, window: int | None = None) -> bool:
    """Whether cuDNN's flash attention runs on a device, which may be abstract, with these heads.

    The log says so once for each kind of layer.
    """
    missing = 'needs an NVIDIA GPU'
    if is_nvidia(device):
        missing = missing_for_flash(dtype, head_dim, capability_of(device))
    kind = f'{device.device_kind}, {dtype}, head dim {head_dim}'
    logger.info(
        'attention: %s (%s%s)%s',
        'XLA' if missing else 'cuDNN flash',
        kind,
        '' if window is None else f', window {window:,}',
        f': flash attention {missing}' if missing else '',
    )
    return not missing


# cuDNN's kernel supports neither Explicit axes nor a second batch dim. Batch and heads are
# independent, so each device runs it on its own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def flash_attention(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Attention o_RSNH, causal or bidirectional, sharded like q; within segments if they are given.

    No scores are saved for the backward pass, which computes them again from the result and the
    log-sum-exp of each query, 4 bytes per query and head.
    """
    return _forward(q_RSNH, k_RSKH, v_RSKH, segment_RS, causal, window, scale)[0]


Saved = tuple[jax.Array | None, ...]


def _forward(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Saved]:
    forward, _ = _kernels(causal, window, scale)
    o_RSNH, lse_RNS = forward(*_given(q_RSNH, k_RSKH, v_RSKH, segment_RS))
    return o_RSNH, (q_RSNH, k_RSKH, v_RSKH, o_RSNH, lse_RNS, segment_RS)


def _backward(
    causal: bool, window: int | None, scale: float, saved: Saved, do_RSNH: jax.Array
) -> Saved:
    _, backward = _kernels(causal, window, scale)
    return *backward(do_RSNH, *_given(*saved)), None


flash_attention.defvjp(_forward, _backward)


def _given(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in arrays if x is not None)


@functools.cache
def _kernels(
    causal: bool, window: int | None, scale: float
) -> tuple[Callable[..., tuple[jax.Array, ...]], ...]:
    """The two passes, of (q, k, v[, segments]) and of (do, q, k, v, o, lse[, segments])."""

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, *segment_RS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return KERNELS['cudnn'].forward(
            q, k, v, causal, *map(_within, segment_RS), window=window, scale=scale
        )

    def backward(do: jax.Array, *saved: jax.Array) -> tuple[jax.Array, ...]:
        arrays, segment_RS = saved[:5], saved[5:]
        return KERNELS['cudnn'].backward(
            *arrays, do, causal, *map(_within, segment_RS), window=window, scale=scale
        )

    return (
        per_device(forward, lambda specs: (specs[0], UNSHARDED.like(specs[0], '*RSNH->*RNS'))),
        per_device(backward, lambda specs: specs[1:4]),
    )


def _within(segment_RS: jax.Array) -> jax.Array:
    """The mask [R, 1, S, Y] of attention within segments."""
    return segment_RS[:, None, :, None] == segment_RS[:, None, None, :]
