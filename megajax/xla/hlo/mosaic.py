"""Recognize grouped matmul kernels in Mosaic GPU (Pallas): megajax's own and jax's.

A kernel is a custom call with the bytecode of a module, in which the kernel's name is a symbol.
"""

import re
from typing import Literal, NamedTuple

TARGET = 'mosaic_gpu_v2'
# The names of megajax's kernels (`megajax/core/model/grouped_kernels.py`).
ROWS, ROWS_TRANSPOSED = 'megajax_grouped_rows', 'megajax_grouped_rows_transposed'
OUTER = 'megajax_grouped_outer'

_NAME = re.compile(r'\\00(\w+)_mosaic_gpu(?=\\00)')
_OF_JAX = re.compile(r'/pallas/ops/gpu/(transposed_)?ragged_dot_mgpu\.py\\00')


class Grouped(NamedTuple):
    """A grouped matmul. Its operands are vectors of integers, and then the two factors.

    `rows` multiplies rows [R, K] by the matrix of their group, which may be `transposed`; it is
    None if only the shapes show that. `outer` adds up the outer products of rows [R, D] and [R, F]
    for each group.
    """

    kind: Literal['rows', 'outer']
    of_jax: bool = False
    transposed: bool | None = False


_GROUPED = {
    ROWS: Grouped('rows'),
    ROWS_TRANSPOSED: Grouped('rows', transposed=True),
    OUTER: Grouped('outer'),
}


def grouped(attributes: str) -> Grouped | None:
    """Return the grouped matmul of a custom call with these attributes; None if it is not one."""
    if f'custom_call_target="{TARGET}"' not in attributes:
        return None
    if of_jax := _OF_JAX.search(attributes):
        kind: Literal['rows', 'outer'] = 'outer' if of_jax[1] else 'rows'
        return Grouped(kind, of_jax=True, transposed=None)
    return next((_GROUPED[name] for name in _NAME.findall(attributes) if name in _GROUPED), None)
