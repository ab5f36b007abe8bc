"""Classify the kernels of a compiled program, and count the bytes and FLOPs of each."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from megajax.xla.hlo.launches import is_launched, launching
from megajax.xla.hlo.memory import bytes_moved
from megajax.xla.hlo.products import Product, inside, target_of
from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.hlo.starts import opcode_of
from megajax.xla.hlo.transfers import kind_of

Kind = Literal[
    'matmul',
    'attention',
    'attention gradient',
    'reduction',
    'elementwise',
    'cast',
    'copy',
    'stack',
    'fill',
    'lookup',
    'random',
    'library call',
]
KINDS: tuple[Kind, ...] = get_args(Kind)

_NO_WORK = {'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'reshape'}
_PART_OF_STACK = {'dynamic-slice', 'dynamic-update-slice'}
_MOVES = {'copy', 'transpose', 'concatenate', 'slice', 'pad', 'reverse', 'broadcast'}
_MAKES = {'broadcast', 'iota'}
_LOOKS_UP = {'gather', 'scatter', 'sort'}
_THREEFRY = {'xor', 'shift-left', 'shift-right-logical'}


class Kernel(NamedTuple):
    """One kernel, with its matmuls (`products`); `bytes` is per execution."""

    computation: Computation
    instruction: Instruction
    kind: Kind
    times: int
    bytes: int
    products: tuple[Product, ...]

    @property
    def flops(self) -> int:
        """The FLOPs of the matmuls in one run of the kernel."""
        return sum(product.flops for product in self.products)


def kernels(program: Program, *, also_unused: bool = False) -> Iterator[Kernel]:
    """Yield every kernel that a program runs, in text order, except kernels that communicate.

    With `also_unused`, also yield kernels that count as never run, with `times` 0: of a branch
    that is not taken, and of a loop that counts as never entered.
    """
    for computation in launching(program):
        times = program.times[computation.name]
        for instruction in computation.instructions:
            is_kernel = is_launched(instruction) and not _communicates(program, instruction)
            if is_kernel and (times or also_unused):
                multiplied = tuple(inside(program, computation, instruction))
                yield Kernel(
                    computation,
                    instruction,
                    _kind(program, computation, instruction, multiplied),
                    times,
                    bytes_moved(program, computation, instruction),
                    multiplied,
                )


def _communicates(program: Program, instruction: Instruction) -> bool:
    """Return whether an instruction is a collective, or a fusion of one and of slices."""
    return any(kind_of(each) for each in _within(program, instruction))


def _kind(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    multiplied: tuple[Product, ...],
) -> Kind:
    if multiplied:
        if any(product.is_attention for product in multiplied):
            is_gradient = 'Backward' in target_of(instruction)
            return 'attention gradient' if is_gradient else 'attention'
        return 'matmul'
    if opcode_of(instruction) == 'custom-call':
        return 'library call'
    work = {each.opcode for each in _within(program, instruction)} - _NO_WORK
    if 'rng-bit-generator' in work or work >= _THREEFRY:
        return 'random'
    if work & _LOOKS_UP:
        return 'lookup'
    if 'reduce' in work or 'reduce-window' in work:
        return 'reduction'
    read = _dtypes_read(computation, instruction)
    if work <= _MAKES or (work <= _MAKES | _MOVES and not read):
        return 'fill'
    if work - _MOVES - _PART_OF_STACK - {'convert'}:
        return 'elementwise'
    if work & _PART_OF_STACK:
        return 'stack'
    return 'cast' if {array.dtype for array in instruction.results} - read else 'copy'


def _within(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, or the instructions of the computation that it fuses."""
    if instruction.opcode in ('fusion', 'fusion-start'):
        yield from program.computations[instruction.called[0]].instructions
    else:
        yield instruction


def _dtypes_read(computation: Computation, instruction: Instruction) -> set[str]:
    return {
        array.dtype
        for name in instruction.operands
        for array in computation.by_name[name].results
        if array.shape
    }
