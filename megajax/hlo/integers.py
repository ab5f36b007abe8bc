"""Operations on integers, as HLO defines them (https://openxla.org/xla/operation_semantics), on values of numpy.

A value is None where it is not known.
"""

import re
from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from megajax.hlo.program import Instruction

Value = np.ndarray | None

DTYPES = {
    'pred': np.bool_, 's8': np.int8, 'u8': np.uint8, 's16': np.int16, 'u16': np.uint16,
    's32': np.int32, 'u32': np.uint32, 's64': np.int64, 'u64': np.uint64,
}  # fmt: skip


def apply(one: Instruction, values: Sequence[Value]) -> Value:
    """The result of an operation on known values; None where it is not known, or the operation is not understood."""
    if one.opcode in _ABSORBING and len(values) == 2:
        for value in values:  # false and x, true or x
            if value is not None and value.dtype == np.bool_ and (value == _ABSORBING[one.opcode]).all():
                return value
    if one.opcode == 'select' and (chosen := values[0]) is not None and (chosen.all() or not chosen.any()):
        return values[1 if chosen.all() else 2]
    known = [value for value in values if value is not None]
    operation = _OPERATIONS.get(one.opcode)
    if operation is None or len(known) < len(values):
        return None
    with np.errstate(over='ignore'):
        result = operation(one, *known)
    return None if result is None else np.asarray(result).astype(dtype_of(one)).reshape(one.results[0].shape)


def dtype_of(one: Instruction) -> type[np.generic]:
    """The numpy dtype of its result."""
    return DTYPES[one.results[0].dtype]


def constant(one: Instruction) -> Value:
    """The value of a constant; None where the text abbreviates it as {...}."""
    tokens = re.findall(r'-?\d+|true|false', one.inputs)
    if len(tokens) != prod(one.results[0].shape):
        return None
    numbers = [{'true': 1, 'false': 0}.get(token) if token.isalpha() else int(token) for token in tokens]
    return np.array(numbers, np.object_).astype(dtype_of(one)).reshape(one.results[0].shape)


def numbers(one: Instruction, key: str) -> list[int]:
    """The numbers after `key=`, in braces or one alone."""
    found = re.search(rf'\b{key}=\{{?([\d,]*)', one.attributes)
    return [int(number) for number in re.findall(r'\d+', found[1])] if found else []


def _compare(one: Instruction, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    directions = {'EQ': 'equal', 'NE': 'not_equal', 'LT': 'less', 'LE': 'less_equal', 'GT': 'greater', 'GE': 'greater_equal'}
    return getattr(np, directions[one.attribute('direction') or ''])(left, right)


def _divide(one: Instruction, left: np.ndarray, right: np.ndarray) -> Value:
    """Rounded towards zero."""
    if not right.all():
        return None
    return (left - np.fmod(left, right)) // right


def _shift(one: Instruction, value: np.ndarray, by: np.ndarray) -> Value:
    bits = value.dtype.itemsize * 8
    unsigned = value.astype(f'u{value.dtype.itemsize}')
    if not ((by >= 0) & (by < bits)).all():
        return None
    by = by.astype(unsigned.dtype)
    if one.opcode == 'shift-left':
        return unsigned << by
    return unsigned >> by if one.opcode == 'shift-right-logical' else value >> by.astype(value.dtype)


def _bitcast(one: Instruction, value: np.ndarray) -> Value:
    """Of vectors only: that of a matrix depends on its layout."""
    if value.dtype.itemsize != np.dtype(dtype_of(one)).itemsize or (value.dtype == np.bool_) != (dtype_of(one) == np.bool_):
        return None
    if sum(size != 1 for size in value.shape) > 1 and value.shape != one.results[0].shape:
        return None
    return value.reshape(one.results[0].shape).view(dtype_of(one))


def _broadcast(one: Instruction, value: np.ndarray) -> np.ndarray:
    shape, dims = one.results[0].shape, numbers(one, 'dimensions')
    return np.broadcast_to(value.reshape([shape[dim] if dim in dims else 1 for dim in range(len(shape))]), shape)


def _iota(one: Instruction) -> np.ndarray:
    shape, [dim] = one.results[0].shape, numbers(one, 'iota_dimension')
    return np.arange(shape[dim]).reshape([-1 if place == dim else 1 for place in range(len(shape))]) + np.zeros(shape, int)


def _slice(one: Instruction, value: np.ndarray) -> np.ndarray:
    found = re.search(r'slice=\{(.*?)\}', one.attributes)
    ranges = re.findall(r'\[(\d+):(\d+)(?::(\d+))?\]', found[1] if found else '')
    return value[tuple(slice(int(low), int(high), int(step or 1)) for low, high, step in ranges)]


def _window(value: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    """A window of these sizes, moved inside where it would reach beyond the end."""
    places = (min(max(int(start), 0), dim - size) for start, dim, size in zip(starts, value.shape, sizes, strict=True))
    return tuple(slice(place, place + size) for place, size in zip(places, sizes, strict=True))


def _dynamic_slice(one: Instruction, value: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    return value[_window(value, starts, one.results[0].shape)]


def _dynamic_update_slice(one: Instruction, value: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    value = value.copy()
    value[_window(value, starts, update.shape)] = update
    return value


def _convert(one: Instruction, value: np.ndarray) -> np.ndarray:
    return value != 0 if dtype_of(one) == np.bool_ else value


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., Value]:
    return lambda one, *values: function(*values)


_ABSORBING = {'and': False, 'or': True}
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
    'remainder': lambda one, left, right: np.fmod(left, right) if right.all() else None,
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
    'transpose': lambda one, value: value.transpose(numbers(one, 'dimensions')),
    'concatenate': lambda one, *values: np.concatenate(values, numbers(one, 'dimensions')[0]),
    'reverse': lambda one, value: np.flip(value, tuple(numbers(one, 'dimensions'))),
}
