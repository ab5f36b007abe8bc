"""cuDNN's flash attention, on the heads and rows that each GPU has."""

import functools
import logging
from collections.abc import Callable

import jax

from megajax.counts.products import fits_flash
from megajax.model.per_device import per_device

logger = logging.getLogger(__name__)


@functools.cache
def can_flash(platform: str, dtype: str, head_dim: int) -> bool:
    """Whether cuDNN's flash attention runs on a device with this dtype and head dim.

    The platform of an NVIDIA GPU is 'gpu'; other GPUs have another name here.
    """
    can = platform == 'gpu' and fits_flash(dtype, head_dim)
    logger.info(
        'attention: %s (%s, %s, head dim %d)',
        'cuDNN flash' if can else 'XLA',
        platform,
        dtype,
        head_dim,
    )
    return can


# cuDNN's kernel supports neither Explicit axes nor a second batch dim. Batch and heads are
# independent, so each device runs it on its own.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def flash_attention(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    causal: bool = True,
) -> jax.Array:
    """Attention o_RSNH, causal or bidirectional, placed as q; within segments if they are given.

    No scores are saved: the backward pass runs the kernel again.
    """
    return _kernels(causal)[0](*_given(q_RSNH, k_RSKH, v_RSKH, segment_RS))[0]


def _forward(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    causal: bool,
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    arrays = q_RSNH, k_RSKH, v_RSKH, segment_RS
    return _kernels(causal)[0](*_given(*arrays))[0], arrays


def _backward(
    causal: bool, arrays: tuple[jax.Array | None, ...], do_RSNH: jax.Array
) -> tuple[jax.Array | None, ...]:
    return *_kernels(causal)[1](do_RSNH, *_given(*arrays)), None


flash_attention.defvjp(_forward, _backward)


def _given(*arrays: jax.Array | None) -> tuple[jax.Array, ...]:
    return tuple(x for x in arrays if x is not None)


@functools.cache
def _kernels(causal: bool) -> tuple[Callable[..., tuple[jax.Array, ...]], ...]:
    """Attention of (q, k, v[, segments]) and its gradients of (do, q, k, v[, segments])."""
    core = functools.partial(_cudnn, causal=causal)

    def gradient(
        do: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array
    ) -> tuple[jax.Array, ...]:
        return jax.vjp(lambda *qkv: core(*qkv, *segments), q, k, v)[1](do)

    return (
        per_device(lambda *arrays: (core(*arrays),), lambda specs: specs[:1]),
        per_device(gradient, lambda specs: specs[1:4]),
    )


def _cudnn(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None = None,
    *,
    causal: bool,
) -> jax.Array:
    mask_R1SY = (
        None if segment_RS is None else segment_RS[:, None, :, None] == segment_RS[:, None, None, :]
    )
    return jax.nn.dot_product_attention(
        q_RSNH, k_RSKH, v_RSKH, mask=mask_R1SY, is_causal=causal, implementation='cudnn'
    )
