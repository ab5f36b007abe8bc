"""Find experts' weights that are gathered although sending the tokens would take fewer bytes.

It works for the compiled program of any project. A matmul counts as a matmul of experts if it is
batched over experts, or if it is a ragged-dot or a grouped matmul kernel.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from megajax.xla.hlo import mosaic, producers
from megajax.xla.hlo.products import product_of
from megajax.xla.hlo.program import Array, Computation, Instruction, Program
from megajax.xla.hlo.starts import opcode_of
from megajax.xla.hlo.transfers import arrays_of, kind_of
from megajax.xla.miscompiles.trace import Place, trace

_DIM = re.compile(r'\bdimensions=\{(\d+)\}')
_GROUP = re.compile(r'\brhs_group_dims=\{(\d+)\}')
_REORDERED = frozenset({'transpose', 'convert'})


class Gathered(NamedTuple):
    """Weights of all experts on a device, and the rows that they multiply there."""

    gather: Instruction
    matmul: Instruction
    experts: int
    weights: Array
    rows: Array


def expert_gathers(program: Program) -> list[str]:
    """Return a line for each all-gather of experts' weights that sending tokens should replace."""
    found = {each.gather.name: each for each in _matmuls(program)}
    return [_line(program, each) for each in found.values()]


def _line(program: Program, found: Gathered) -> str:
    matmul = found.matmul
    source = program.source(matmul) or 'no source line'
    return (
        f'{found.gather.name} for {matmul.op_name or matmul.name} ({source}): the weights of '
        f'{found.experts} experts are all-gathered, {found.weights}, to multiply {found.rows} on a '
        'device: send the tokens to the devices of their experts instead, and back (all-to-all)'
    )


def _matmuls(program: Program) -> Iterator[Gathered]:
    """Yield each matmul whose weights have more than twice the bytes of its rows."""
    for computation in program.computations.values():
        for instruction in computation.instructions:
            for weights, rows, count in _factors(computation, instruction):
                gather = _gather(program, weights, count)
                if gather is None or not _is_argument(program, gather):
                    continue
                whole = arrays_of(gather.home, gather.instruction)[gather.operand].result
                if whole.bytes > 2 * rows.bytes:
                    yield Gathered(gather.instruction, instruction, count, whole, rows)


def _factors(
    computation: Computation, instruction: Instruction
) -> Iterator[tuple[Place, Array, int]]:
    """Yield each factor of a matmul of several experts, the other factor, and their count."""
    product = product_of(computation, instruction)
    if product is None or product.is_attention:
        return
    place = Place(computation, instruction)
    if mosaic.grouped(instruction.attributes):
        rows, weights = (place.operand(len(instruction.operands) - back) for back in (2, 1))
        array = weights.instruction.results[0]
        if len(array.shape) == 3:
            yield weights, rows.instruction.results[0], array.shape[0]
        return
    if opcode_of(instruction) == 'ragged-dot':
        rows, weights = place.operand(0), place.operand(1)
        if group := _GROUP.search(instruction.attributes):
            count = weights.instruction.results[0].shape[int(group[1])]
            yield weights, rows.instruction.results[0], count
        return
    if product.sizes[0] > 1:
        for index in (0, 1):
            other = place.operand(1 - index).instruction.results[0]
            yield place.operand(index), other, product.sizes[0]


class _Gather(NamedTuple):
    """An all-gather, and the index of one of its arrays."""

    home: Computation
    instruction: Instruction
    operand: int  # the array's index


def _gather(program: Program, weights: Place, count: int) -> _Gather | None:
    """Return the all-gather along the experts' dim that makes all of these weights, or None."""
    place, index = trace(program, weights, through=_REORDERED), 0
    if place.instruction.opcode == 'get-tuple-element':
        index = int(place.instruction.attribute('index') or 0)
        place = trace(program, place.operand(0))
    if kind_of(place.instruction) != 'all-gather':
        return None
    dim = _DIM.search(place.instruction.attributes)
    shape = arrays_of(*place)[index].result.shape
    is_of_experts = dim is not None and shape[int(dim[1])] == count
    return _Gather(*place, index) if is_of_experts else None


def _is_argument(program: Program, gather: _Gather) -> bool:
    """Return whether a gathered array is an argument of the program, or a part of an argument."""
    operand = gather.home.by_name[gather.instruction.operands[gather.operand]]
    origin = producers.producer(
        program, producers.Place(gather.home, operand), through=producers.COPIES
    )
    return origin.instruction.opcode == 'parameter' and not program.callers.get(
        origin.computation.name
    )
