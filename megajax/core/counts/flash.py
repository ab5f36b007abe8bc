"""Whether a step's attention runs on cuDNN's flash kernel, by the GPU's compute capability."""

from megajax.core.config.schema import Config
from megajax.core.hardware.records import Capability

HOPPER = 9, 0


def missing_for_flash(dtype: str, head_dim: int, capability: Capability | None) -> str:
    """Return what a GPU of this capability or these heads lack for flash attention, or ''.

    The backward pass supports head dims over 128 on Hopper only. An unknown GPU counts as
    supporting 128.
    """
    if capability is not None and capability < (8, 0):
        return 'needs compute capability 8.0'
    if dtype not in ('bfloat16', 'float16', 'fp8'):
        return 'needs bfloat16 or float16'
    most = 256 if capability is not None and capability[0] == HOPPER[0] else 128
    if head_dim > most:
        return f'takes head dims up to {most} on this GPU'
    return 'needs a head dim that is a multiple of 8' if head_dim % 8 else ''


def uses_flash(
    config: Config, capability: Capability | None = HOPPER, *, with_dropout: bool = False
) -> bool:
    """Whether training on a GPU with this capability runs cuDNN's flash attention.

    With attention dropout, the result is true only if `with_dropout` is.
    """
    model = config.model
    return not missing_for_flash(config.train.dtype, model.head_dim, capability) and (
        with_dropout or model.attention_dropout == 0
    )
