"""Megatron-LM's arguments that select layers: a frequency, or a number for each layer.

Imports no jax.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

MAX_LAYERS = 2**16


def frequency_of(arguments: Mapping[str, Any], name: str) -> int | Sequence[int] | None:
    """Return the value of an argument that is a frequency, or a list with a number for each layer.

    A list may be an expression of sums and multiples, as in '([0]*3+[1])*8'. Raises ValueError for
    any other text, and for a list of the wrong length.
    """
    value = arguments.get(name)
    if isinstance(value, str):
        try:
            value = _value(ast.parse(value.strip(), mode='eval').body)
        except (SyntaxError, ValueError, RecursionError):
            raise ValueError(f'{name}={value!r:.80} is neither a number nor a list') from None
    if isinstance(value, Sequence) and len(value) != arguments['num_layers']:
        raise ValueError(
            f'{name} has {len(value)} numbers, but num_layers={arguments["num_layers"]}'
        )
    return value


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(int() as number):
            return number
        case ast.List(parts):
            return [_number(_value(part)) for part in parts]
        case ast.BinOp(left, ast.Add(), right):
            return _bounded(_list(_value(left)), _list(_value(right)))
        case ast.BinOp(left, ast.Mult(), right):
            numbers, times = _value(left), _value(right)
            numbers, times = (times, numbers) if isinstance(numbers, int) else (numbers, times)
            if not 0 <= _number(times) <= MAX_LAYERS:
                raise ValueError
            return _bounded(*[_list(numbers)] * times)
    raise ValueError


def _number(x: Any) -> int:
    if not isinstance(x, int):
        raise ValueError
    return x


def _list(x: Any) -> list[int]:
    if not isinstance(x, list):
        raise ValueError
    return x


def _bounded(*parts: list[int]) -> list[int]:
    if sum(map(len, parts)) > MAX_LAYERS:
        raise ValueError
    return [number for part in parts for number in part]
