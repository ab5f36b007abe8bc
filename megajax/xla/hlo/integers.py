"""HLO's integer operations on numpy values; None is an unknown value.

See https://openxla.org/xla/operation_semantics.
"""

import re
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from megajax.xla.hlo.program import Instruction

Value = np.ndarray | None

INTEGER_DTYPES = {
    'pred': np.bool_, 's8': np.int8, 'u8': np.uint8, 's16': np.int16, 'u16': np.uint16,
    's32': np.int32, 'u32': np.uint32, 's64': np.int64, 'u64': np.uint64,
}  # fmt: skip


def apply(instruction: Instruction, values: Sequence[Value]) -> Value:
    """Return the result of an operation; None if it is unknown or not supported."""
    for value in values if instruction.opcode in _ABSORBING else ():  # false and x, true or x
        if value is None or value.dtype != np.bool_:
            continue
        if np.equal(value, _ABSORBING[instruction.opcode]).all():
            return value
    if instruction.opcode == 'select' and (chosen := values[0]) is not None:
        if chosen.all():
            return values[1]
        if not chosen.any():
            return values[2]
    known = [value for value in values if value is not None]
    operation = _OPERATIONS.get(instruction.opcode)
    if operation is None or len(known) < len(values):
        return None
    with np.errstate(over='ignore'):
        result = operation(instruction, *known)
    if result is None:
        return None
    return np.asarray(result).astype(dtype_of(instruction)).reshape(instruction.results[0].shape)


def dtype_of(instruction: Instruction) -> type[np.generic]:
    """Return the numpy dtype of the result of an instruction."""
    return INTEGER_DTYPES[instruction.results[0].dtype]


def constant(instruction: Instruction) -> Value:
    """Return the value of a constant; None if the text abbreviates it as {...}."""
    tokens = re.findall(r'-?\d+|true|false', instruction.inputs)
    words = {'true': 1, 'false': 0}
    if len(tokens) != prod(instruction.results[0].shape):
        return None
    literal = [words[token] if token in words else int(token) for token in tokens]
    return (
        np.array(literal, np.object_)
        .astype(dtype_of(instruction))
        .reshape(instruction.results[0].shape)
    )


def numbers(instruction: Instruction, key: str) -> list[int]:
    """Return the numbers after `key=`: a list in braces, or a single number."""
    match = re.search(rf'\b{key}=\{{?([\d,]*)', instruction.attributes)
    return [int(number) for number in re.findall(r'\d+', match[1])] if match else []


def _compare(instruction: Instruction, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return _COMPARISONS[instruction.attribute('direction') or ''](left, right)


def _divide(instruction: Instruction, left: np.ndarray, right: np.ndarray) -> Value:
    """Divide and round towards zero; None if a divisor is zero."""
    if not right.all():
        return None
    return (left - np.fmod(left, right)) // right


def _shift(instruction: Instruction, value: np.ndarray, by: np.ndarray) -> Value:
    bits = value.dtype.itemsize * 8
    unsigned = value.astype(f'u{value.dtype.itemsize}')
    if not ((by >= 0) & (by < bits)).all():
        return None
    by = by.astype(unsigned.dtype)
    if instruction.opcode == 'shift-left':
        return unsigned << by
    if instruction.opcode == 'shift-right-logical':
        return unsigned >> by
    return value >> by.astype(value.dtype)


def _bitcast(instruction: Instruction, value: np.ndarray) -> Value:
    """Bitcast a vector; return None for a reshaped matrix: its bits would depend on the layout."""
    dtype = np.dtype(dtype_of(instruction))
    if value.dtype.itemsize != dtype.itemsize or (value.dtype == np.bool_) != (dtype == np.bool_):
        return None
    if sum(size != 1 for size in value.shape) > 1 and value.shape != instruction.results[0].shape:
        return None
    return value.reshape(instruction.results[0].shape).view(dtype)


def _broadcast(instruction: Instruction, value: np.ndarray) -> np.ndarray:
    shape, dims = instruction.results[0].shape, numbers(instruction, 'dimensions')
    spread = [size if dim in dims else 1 for dim, size in enumerate(shape)]
    return np.broadcast_to(value.reshape(spread), shape)


def _iota(instruction: Instruction) -> np.ndarray:
    shape, [dim] = instruction.results[0].shape, numbers(instruction, 'iota_dimension')
    spread = [-1 if place == dim else 1 for place in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dim]).reshape(spread), shape)


def _slice(instruction: Instruction, value: np.ndarray) -> np.ndarray:
    match = re.search(r'slice=\{(.*?)\}', instruction.attributes)
    ranges = re.findall(r'\[(\d+):(\d+)(?::(\d+))?\]', match[1] if match else '')
    return value[tuple(slice(int(low), int(high), int(step or 1)) for low, high, step in ranges)]


def _window(
    value: np.ndarray,
    starts: Sequence[np.ndarray],
    sizes: Sequence[int],
) -> tuple[slice, ...]:
    """Return a window of these sizes, moved inward if it would extend beyond the end."""
    window = []
    for start, dim, size in zip(starts, value.shape, sizes, strict=True):
        place = min(max(int(start), 0), dim - size)
        window.append(slice(place, place + size))
    return tuple(window)


def _dynamic_slice(instruction: Instruction, value: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    return value[_window(value, starts, instruction.results[0].shape)]


def _dynamic_update_slice(
    instruction: Instruction,
    value: np.ndarray,
    update: np.ndarray,
    *starts: np.ndarray,
) -> np.ndarray:
    value = value.copy()
    value[_window(value, starts, update.shape)] = update
    return value


def _convert(instruction: Instruction, value: np.ndarray) -> np.ndarray:
    return value != 0 if dtype_of(instruction) == np.bool_ else value


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
    return lambda instruction, *values: function(*values)


_ABSORBING = {'and': False, 'or': True}
_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    'EQ': np.equal, 'NE': np.not_equal, 'LT': np.less, 'LE': np.less_equal,
    'GT': np.greater, 'GE': np.greater_equal,
}  # fmt: skip
REDUCTIONS = {
    'add': np.add, 'multiply': np.multiply, 'maximum': np.maximum, 'minimum': np.minimum,
    'and': np.bitwise_and, 'or': np.bitwise_or,
}  # fmt: skip
_OPERATIONS: dict[str, Callable[..., Value]] = {
    **{name: _elementwise(operation) for name, operation in REDUCTIONS.items()},
    'subtract': _elementwise(np.subtract),
    'xor': _elementwise(np.bitwise_xor),
    'not': _elementwise(np.invert),
    'negate': _elementwise(np.negative),
    'abs': _elementwise(np.abs),
    'sign': _elementwise(np.sign),
    'copy': _elementwise(lambda value: value),
    'clamp': _elementwise(lambda low, value, high: np.minimum(np.maximum(value, low), high)),
    'select': _elementwise(np.where),
    'compare': _compare,
    'divide': _divide,
    'remainder': lambda instruction, left, right: np.fmod(left, right) if right.all() else None,
    'shift-left': _shift,
    'shift-right-logical': _shift,
    'shift-right-arithmetic': _shift,
    'convert': _convert,
    'bitcast': _bitcast,
    'bitcast-convert': _bitcast,
    'reshape': _elementwise(lambda value: value),
    'broadcast': _broadcast,
    'iota': _iota,
    'slice': _slice,
    'dynamic-slice': _dynamic_slice,
    'dynamic-update-slice': _dynamic_update_slice,
    'transpose': lambda instruction, value: value.transpose(numbers(instruction, 'dimensions')),
    'concatenate': lambda instruction, *values: np.concatenate(
        values, numbers(instruction, 'dimensions')[0]
    ),
    'reverse': lambda instruction, value: np.flip(value, tuple(numbers(instruction, 'dimensions'))),
}
