"""cuDNN's flash attention, on the heads and sequences of each GPU."""

import functools
import logging
from typing import Any

from megajax.core.counts.flash import missing_for_flash
from megajax.core.hardware.targets import capability_of, is_nvidia
from megajax.core.model.kernels import KERNELS
from megajax.core.model.passes import Passes, of_sequences, on_each_device

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


# cuDNN's kernel supports neither Explicit axes nor a second batch dim. Batch and heads are
# independent, so each device runs it on its own.
@functools.cache
def passes(causal: bool, window: int | None, scale: float) -> Passes:
    """Return the passes of attention, causal or bidirectional; they save no scores."""
    return on_each_device(
        of_sequences(KERNELS['cudnn'].scaled(scale), causal=causal, window=window)
    )
