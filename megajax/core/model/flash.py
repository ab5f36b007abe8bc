"""cuDNN's flash attention, on the heads and sequences of each GPU."""

import functools
import logging
from typing import Any

import jax

from megajax.core.counts.flash import missing_for_flash
from megajax.core.hardware.targets import capability_of, is_nvidia
from megajax.core.model.kernels import KERNELS, same_document
from megajax.core.model.passes import Passes, attend_by, on_each_device

logger = logging.getLogger(__name__)


@functools.cache
def can_flash(
    device: Any,
    dtype: str,
    head_dim: int,
    window: int | None = None,
    masked_tokens: int = 0,
    *,
    has_dropout: bool = False,
) -> bool:
    """Whether cuDNN's flash attention runs on a device, which may be abstract, with these heads.

    `masked_tokens` is as in `missing_for_flash`. The log says so once for each kind of layer.
    """
    missing = 'has no dropout' if has_dropout else ''
    if not is_nvidia(device):
        missing = 'needs an NVIDIA GPU'
    elif not missing:
        missing = missing_for_flash(dtype, head_dim, capability_of(device), masked_tokens)
    kind = f'{device.device_kind}, {dtype}, head dim {head_dim}'
    logger.info(
        'attention: %s (%s%s)%s',
        'XLA' if missing else 'cuDNN flash',
        kind,
        '' if window is None else f', window {window:,}',
        f': flash attention {missing}' if missing else '',
    )
    return not missing


def flash_attention(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    segment_RS: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Return attention o_RSNH, causal or bidirectional, sharded like q; within segments, if given.

    No scores are saved for the backward pass.
    """
    passes = _passes(causal, window, scale)
    return attend_by(passes, q_RSNH, k_RSKH, v_RSKH, segment_RS, sinks_N)


# cuDNN's kernel supports neither Explicit axes nor a second batch dim. Batch and heads are
# independent, so each device runs it on its own.
@functools.cache
def _passes(causal: bool, window: int | None, scale: float) -> Passes:
    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, segment_RS: jax.Array | None, _: None
    ) -> tuple[jax.Array, jax.Array]:
        kernel = KERNELS['cudnn'].scaled(scale)
        return kernel.forward(q, k, v, causal, same_document(segment_RS), window=window)

    def backward(*arrays: Any) -> tuple[jax.Array, ...]:
        *saved, segment_RS, _ = arrays
        kernel = KERNELS['cudnn'].scaled(scale)
        return kernel.backward(*saved, causal, same_document(segment_RS), window=window)

    return on_each_device(Passes(forward, backward))
