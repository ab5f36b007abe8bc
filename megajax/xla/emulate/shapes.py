"""Types as HLO writes them: `bf16[8,16]{0,1}`, or a tuple of such types."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.xla.hlo.errors import HloError

_SHAPE = re.compile(r'(\w+)\[([\d,]*)\](?:\{([\d,]*)[^}]*\})?')
_LAYOUT = re.compile(r'(?<=\])\{[^}]*\}')
_DTYPES = {
    'pred': jnp.bool, 's8': jnp.int8, 'u8': jnp.uint8, 's32': jnp.int32, 'u32': jnp.uint32,
    'f8e4m3fn': jnp.float8_e4m3fn, 'f8e5m2': jnp.float8_e5m2,
    'bf16': jnp.bfloat16, 'f16': jnp.float16, 'f32': jnp.float32, 'f64': jnp.float64,
}  # fmt: skip


class Shape(NamedTuple):
    """The dtype, the dims, and the order of the dims in memory, slowest first."""

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]

    def __str__(self) -> str:
        return f'{self.dtype}[{joined(self.dims)}]'

    @property
    def physical(self) -> tuple[int, ...]:
        """The dims in the order of memory."""
        return tuple(self.dims[dim] for dim in self.order)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Return the shape for jax, which stores arrays in the order of their dims."""
        if self.dtype not in _DTYPES:
            raise HloError(f'no translation for a library call with arrays of {self.dtype}')
        return jax.ShapeDtypeStruct(self.dims, _DTYPES[self.dtype])


def shapes(text: str) -> list[Shape]:
    """Return the arrays of a type; nested tuples are flattened."""
    arrays = []
    for dtype, dims, minor_to_major in _SHAPE.findall(text):
        sizes = numbers(dims)
        order = numbers(minor_to_major)[::-1] or tuple(range(len(sizes)))
        arrays.append(Shape(dtype, sizes, order))
    return arrays


def without_layouts(text: str) -> str:
    """Return the type with every array stored in the order of its dims."""
    return _LAYOUT.sub('', text)


def numbers(text: str) -> tuple[int, ...]:
    """Return the integers of a list such as `0,2,1`."""
    return tuple(int(number) for number in re.findall(r'\d+', text))


def joined(numbers: Iterable[int]) -> str:
    """Write integers as a list such as `0,2,1`."""
    return ','.join(map(str, numbers))


def split(text: str) -> list[str]:
    """Split the text at commas that are outside brackets and quotes."""
    pieces, depth, quoted, start = list[str](), 0, False, 0
    for place, letter in enumerate(text):
        if letter == '"' and text[place - 1] != '\\':
            quoted = not quoted
        elif not quoted and letter == ',' and not depth:
            pieces.append(text[start:place].strip())
            start = place + 1
        elif not quoted:
            depth += (letter in '([{') - (letter in ')]}')
    return [piece for piece in [*pieces, text[start:].strip()] if piece]
