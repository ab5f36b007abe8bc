"""Whether the matmuls of dropless experts run as kernels, by the GPU's compute capability."""

from collections.abc import Iterable

from megajax.core.counts.expert_rows import SMALLEST_BLOCK
from megajax.core.counts.flash import HOPPER
from megajax.core.hardware.records import Capability

KERNEL_STEP = 64  # elements that a grouped matmul kernel loads at once, in each dim


def missing_for_kernels(
    dtype: str, sizes: Iterable[int], block: int, capability: Capability | None
) -> str:
    """Return what a GPU or these sizes lack for the grouped matmul kernels, or '' if nothing.

    `sizes` are the features before and after the matmul, and `block` is the number of rows of a
    block, all of which belong to one expert.
    """
    if capability != HOPPER:
        return 'need compute capability 9.0'
    if dtype not in ('bfloat16', 'float16'):
        return 'need bfloat16 or float16'
    if any(size % KERNEL_STEP for size in sizes):
        return f'need features that are multiples of {KERNEL_STEP}'
    return '' if block % KERNEL_STEP == 0 else f'need at least {KERNEL_STEP} rows in a block'


def smallest_block(capability: Capability | None) -> int:
    """Return the fewest rows of a block on a GPU; a capability of None is a CPU or unknown GPU."""
    return KERNEL_STEP if capability == HOPPER else SMALLEST_BLOCK
