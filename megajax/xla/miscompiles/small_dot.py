"""A small matmul fused with a reduction on a CPU, with wrong last rows."""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.stages import Lowered

from megajax.xla.hlo.program import DTYPE_BITS, Computation, Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro
from megajax.xla.miscompiles.trace import Place, places, trace

ROWS = 32_769
MAX_CONTRACTED = 3  # elements; with 4 and more, results were correct
TILE_BYTES = 2**17  # size of a dim beyond which rows are lost
_ELEMENTWISE = frozenset({'multiply', 'add', 'subtract', 'negate', 'abs', 'convert', 'transpose'})


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every YNNPACK fusion of a matmul over at most three elements with its reduction."""
    for _, instruction in places(program):
        if '"__ynn_fusion"' in instruction.attributes and instruction.called:
            inside = program.computations[instruction.called[0]]
            inner = inside.instructions
            is_small = any(_is_small(inside, dot) for dot in inner)
            if is_small and any(_sums_dot(program, inside, each) for each in inner):
                yield instruction


def _is_small(inside: Computation, dot: Instruction) -> bool:
    if dot.opcode != 'dot':
        return False
    left = inside.by_name[dot.operands[0]].results[0]
    dims = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', dot.attributes)
    contracted = prod(left.shape[int(dim)] for dim in dims[1].split(',') if dim) if dims else 1
    result = dot.results[0]
    longest = max(result.shape, default=1) * DTYPE_BITS[result.dtype] // 8
    return 1 < contracted <= MAX_CONTRACTED and longest > TILE_BYTES


def _sums_dot(program: Program, inside: Computation, reduction: Instruction) -> bool:
    if reduction.opcode != 'reduce':
        return False
    summed = trace(program, Place(inside, reduction).operand(0), through=_ELEMENTWISE)
    return summed.instruction.opcode == 'dot'


def _lower(devices: Sequence[Any]) -> Lowered:
    def squares(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.sum((jnp.eye(3, dtype=x.dtype) @ row) ** 2))(x)

    sharding = SingleDeviceSharding(devices[0])
    return jax.jit(squares).lower(jax.ShapeDtypeStruct((ROWS, 3), jnp.float32, sharding=sharding))


def _is_wrong(compiled: Any) -> bool:
    rows = np.stack([np.arange(ROWS, dtype=np.float32), *np.zeros((2, ROWS), np.float32)], axis=1)
    return not np.array_equal(np.asarray(compiled(jnp.asarray(rows))), rows[:, 0] ** 2)


SMALL_DOT = Miscompile(
    name='a small matmul and its reduction on CPUs',
    what='a matmul over two or three elements, fused with its reduction, has wrong last rows',
    where='a 3 x 3 matrix times more than 32,768 vectors (fp32; fp64: 16,384), reduced at once',
    platform='cpu',
    source='jax-ml/jax#39103',
    is_certain=False,
    detect=detect,
    repro=Repro(num_devices=1, lower=_lower, is_wrong=_is_wrong),
    workaround={'xla_disable_hlo_passes': 'dot-library-rewriter'},
    remedy='set the compiler option xla_disable_hlo_passes=dot-library-rewriter, or use a '
    'different jaxlib',
)
