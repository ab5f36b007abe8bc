"""Count the multiplications of a convolution, which XLA for TPUs uses for every matmul.

Batch and contracted dims become spatial dims of a window that is padded or dilated, so that most
positions of the window lie outside of the array. Only the others count. On GPUs, cuDNN computes
convolutions and their gradients.
"""

import functools
import re
from math import prod

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Array, Instruction

_LABELS = re.compile(r'\bdim_labels=(\w+)_(\w+)->(\w+)')
_WINDOW = re.compile(r'\bwindow=\{([^}]*)\}')
_DEFAULTS = {'stride': 1, 'pad': 0, 'lhs_dilate': 1, 'rhs_dilate': 1}


def of_cudnn(
    instruction: Instruction, target: str, first: Array, second: Array, result: Array
) -> tuple[int, int]:
    """Return the multiplications of cuDNN's convolution `target`, and its result's features.

    `first` and `second` are its first operands. The gradients of the input and of the filter have
    the labels and the window of the convolution itself.
    """
    match target:
        case '__cudnn$convBackwardInput':
            arrays, place, features = (result, second, first), 0, 'f'
        case '__cudnn$convBackwardFilter':
            arrays, place, features = (first, result, second), 1, 'o'
        case _:
            arrays, place, features = (first, second, result), 2, 'f'
    count = multiplications(instruction, *arrays)
    return count, result.shape[_labels(instruction)[place].index(features)]


def multiplications(instruction: Instruction, left: Array, right: Array, result: Array) -> int:
    """Return the number of multiplications of a convolution of two arrays."""
    of_left, of_right, of_result = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(_labels(instruction), (left, right, result), strict=True)
    )
    window = _window(instruction)
    positions = (
        _inside(
            of_left[dim],
            of_result[dim],
            of_right[dim],
            *(_number(window, name, int(dim), default) for name, default in _DEFAULTS.items()),
        )
        for dim in of_left
        if dim.isdecimal()
    )
    return of_result['b'] * of_result['f'] * of_right['i'] * prod(positions)


def _labels(instruction: Instruction) -> tuple[str, ...]:
    """Return the names of the dims of the input, of the filter and of the result."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        raise HloError(f'a convolution without dim_labels: {instruction.line}')
    return labels.groups()


def _window(instruction: Instruction) -> dict[str, list[str]]:
    match = _WINDOW.search(instruction.attributes)
    fields = (field.partition('=') for field in match[1].split()) if match else ()
    return {name: values.split('x') for name, _, values in fields}


def _number(window: dict[str, list[str]], name: str, dim: int, default: int) -> int:
    """Return a window's number along a dim; of the padding, the part before the array."""
    return int(window[name][dim].partition('_')[0]) if name in window else default


@functools.cache
def _inside(
    length: int, outputs: int, size: int, stride: int, pad: int, dilation: int, spacing: int
) -> int:
    """Count the pairs of output and window position that read an element of the array."""
    import numpy as np  # takes a third of the time in which `megajax plan` starts

    starts = np.arange(outputs) * stride - pad
    return sum(
        int(np.count_nonzero((at >= 0) & (at < length * dilation) & (at % dilation == 0)))
        for at in (starts + index * spacing for index in range(size))
    )
