"""Whether a step's attention runs on cuDNN's flash kernel, by the GPU's compute capability."""

from megajax.core.config.schema import Config
from megajax.core.hardware.records import Capability

HOPPER = 9, 0


def missing_for_flash(
    dtype: str, head_dim: int, capability: Capability | None, masked_tokens: int = 0
) -> str:
    """Return what a GPU, these heads or this mask lack for flash attention, or ''.

    The backward pass supports head dims over 128 on Hopper only. An unknown GPU counts as
    supporting 128. `masked_tokens` is the length of the sequences if attention has a mask other
    than a causal one or a window, otherwise 0.
    """
    if capability is not None and capability < (8, 0):
        return 'needs compute capability 8.0'
    if dtype not in ('bfloat16', 'float16', 'fp8'):
        return 'needs bfloat16 or float16'
    most = 256 if capability is not None and capability[0] == HOPPER[0] else 128
    if head_dim > most:
        return f'takes head dims up to {most} on this GPU'
    if head_dim % 8:
        return 'needs a head dim that is a multiple of 8'
    return 'takes masks of an even number of tokens only' if masked_tokens % 2 else ''


def uses_flash(
    config: Config, capability: Capability | None = HOPPER, *, with_dropout: bool = False
) -> bool:
    """Whether training on a GPU with this capability runs cuDNN's flash attention.

    With attention dropout, the result is true only if `with_dropout` is.
    """
    dtype, model = config.train.dtype, config.model
    return not missing_for_flash(dtype, model.head_dim, capability, _masked_tokens(config)) and (
        with_dropout or model.attention_dropout == 0
    )


def _masked_tokens(config: Config) -> int:
    """Return `masked_tokens` of `missing_for_flash` for a step.

    A layer with a window in context shards has masks of chunks. If there is one, its number counts
    for all layers.
    """
    mesh, tokens = config.mesh, config.train.seq_len
    has_mask = config.data.document_mask or config.relevance is not None or not config.model.causal
    if not has_mask:
        return 0
    has_halos = mesh.context > 1 and not mesh.exchanges_heads
    windows = (layer.window for layer in config.model.pattern)
    if has_halos and any(window is not None and window < tokens for window in windows):
        return tokens // (2 * mesh.context)
    return tokens
