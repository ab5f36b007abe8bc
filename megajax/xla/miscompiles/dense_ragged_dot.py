"""A ragged_dot that multiplies each row by the weights of all experts."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from megajax.xla.hlo.products import product_of
from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro, replicated
from megajax.xla.miscompiles.trace import Place, places, trace

_REORDERED = frozenset({'transpose', 'convert'})


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every matmul whose rows are repeated for each expert, and zero except in one copy."""
    for place in places(program):
        if copies(program, place) > 1:
            yield place.instruction


def copies(program: Program, place: Place) -> int:
    """Return how often a matmul repeats the rows of an operand; 1 if it is not of this kind."""
    if product_of(*place) is None:
        return 1
    operands = range(min(len(place.instruction.operands), 2))
    return max((_copies(program, place.operand(index)) for index in operands), default=1)


def _copies(program: Program, place: Place) -> int:
    """Return how often an operand repeats rows, if a mask keeps a range of them in each copy."""
    masked = trace(program, place, through=_REORDERED)
    if masked.instruction.opcode != 'select':
        return 1
    mask, kept, other = (trace(program, masked.operand(index)) for index in range(3))
    if not _is_of_range(program, mask) or not _is_zero(program, other):
        return 1
    repeated = trace(program, kept, through=_REORDERED)
    if repeated.instruction.opcode != 'broadcast':
        return 1
    rows = prod(repeated.operand(0).instruction.results[0].shape)
    return prod(repeated.instruction.results[0].shape) // rows if rows > 1 else 1


def _is_of_range(program: Program, place: Place) -> bool:
    """Return whether a mask compares the numbers of rows with both ends of a range."""
    place = trace(program, place)
    operands = [place.operand(index) for index in range(len(place.instruction.operands))]
    if place.instruction.opcode == 'and':
        return all(_is_of_range(program, operand) for operand in operands)
    if place.instruction.opcode != 'compare':
        return False
    sources = [_repeated(program, operand).instruction.opcode for operand in operands]
    return sources.count('iota') == 1 and 'constant' not in sources


def _is_zero(program: Program, place: Place) -> bool:
    instruction = _repeated(program, place).instruction
    return instruction.opcode == 'constant' and instruction.line.partition('constant(')[2][0] == '0'


def _repeated(program: Program, place: Place) -> Place:
    """Return the array that a value repeats."""
    return trace(program, place, through=_REORDERED | {'broadcast'})


def _detail(program: Program, instruction: Instruction) -> str:
    count = copies(program, next(x for x in places(program) if x.instruction is instruction))
    return f'{count} times the FLOPs and {count} copies of the rows'


def _lower(devices: Sequence[Any]) -> Lowered:
    operands = replicated(devices, (512, 128), (8, 128, 128), dtype=jnp.bfloat16)
    sizes = replicated(devices, (8,), dtype=jnp.int32)
    return jax.jit(jax.lax.ragged_dot).lower(*operands, *sizes)


DENSE_RAGGED_DOT = Miscompile(
    name='ragged_dot over all experts',
    what="each row is multiplied by every expert's weights, and all results but one are dropped",
    where='jax.lax.ragged_dot and its gradients, as in a mixture of experts without a capacity',
    platform='gpu',
    source='openxla/xla#40189',
    effect='slow',
    detect=detect,
    detail=_detail,
    repro=Repro(num_devices=1, lower=_lower),
    remedy=(
        'use a Pallas kernel (jax.experimental.pallas.ops.gpu.ragged_dot_mgpu), blocks of rows '
        'with one expert each, or a capacity and a batched matmul'
    ),
)
