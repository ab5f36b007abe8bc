"""Follow a value of a compiled program back to its origin, and compute integers per device."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megajax.xla.hlo.program import Computation, Instruction, Program

MAX_DEPTH = 64  # most steps back; every chain of copies is shorter
# Instructions that pass a value on with its numbers unchanged.
_SAME = {
    'bitcast', 'copy', 'reshape', 'opt-barrier', 'domain', 'copy-start', 'copy-done',
    'recv-done', 'async-done', 'fusion-done', 'all-reduce-done', 'collective-permute-done',
    'all-gather-done', 'reduce-scatter-done',
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., int]] = {
    'add': lambda a, b: a + b,
    'subtract': lambda a, b: a - b,
    'multiply': lambda a, b: a * b,
    'minimum': min,
    'maximum': max,
    'clamp': lambda low, value, high: min(max(value, low), high),
    'convert': lambda value: value,
}


_CALLERS = ('fusion', 'call', 'fusion-start', 'async-start')


class Place(NamedTuple):
    """An instruction and the computation that contains it."""

    home: Computation
    instruction: Instruction

    def operand(self, index: int) -> 'Place':
        """Return the place of an operand of the instruction."""
        return Place(self.home, self.home.by_name[self.instruction.operands[index]])


def places(program: Program) -> Iterator[Place]:
    """Yield every instruction of a program."""
    for home in program.computations.values():
        for instruction in home.instructions:
            yield Place(home, instruction)


def trace(
    program: Program,
    place: Place,
    *,
    through: frozenset[str] = frozenset(),
    around: bool = True,
) -> Place:
    """Return the instruction that computes a value, through copies, fusions, tuples and loops.

    A value that a loop carries and changes is followed to the end of an iteration, unless
    `around=False`.
    """
    for _ in range(MAX_DEPTH):
        before = _before(program, place, through, around)
        if before is None:
            return place
        place = before
    return place


def _before(program: Program, place: Place, through: frozenset[str], around: bool) -> Place | None:
    instruction = place.instruction
    if instruction.opcode == 'parameter':
        return _given(program, place)
    if instruction.opcode in _CALLERS and instruction.called:
        inside = program.computations[instruction.called[0]]
        return Place(inside, inside.root)
    if instruction.opcode == 'get-tuple-element':
        index = int(instruction.attribute('index') or 0)
        return _element(program, place.operand(0), index, around)
    if instruction.opcode in _SAME or instruction.opcode in through:
        return place.operand(0)
    return None


def _given(program: Program, place: Place) -> Place | None:
    """Return the operand of a parameter, if only one fusion or call runs its computation."""
    callers = program.callers.get(place.home.name, [])
    if len(callers) != 1 or callers[0][1].opcode not in _CALLERS:
        return None
    parameters = place.home.parameters.items()
    number = next(number for number, parameter in parameters if parameter is place.instruction)
    return Place(*callers[0]).operand(number)


def _element(program: Program, owner: Place, index: int, around: bool) -> Place | None:
    """Return one element of a tuple, or of the values that a loop carries.

    A carried value is followed to the loop's initial value if no iteration changes it; otherwise,
    if `around`, to the end of an iteration.
    """
    instruction = owner.instruction
    if instruction.opcode == 'tuple':
        return owner.operand(index)
    if instruction.opcode == 'opt-barrier':
        return _element(program, owner.operand(0), index, around)
    if instruction.opcode in ('fusion', 'call'):
        inside = program.computations[instruction.called[0]]
        return _element(program, Place(inside, inside.root), index, around)
    if instruction.opcode == 'recv-done' and index == 0:
        return owner.operand(0)
    if instruction.opcode == 'parameter':
        callers = program.callers.get(owner.home.name, [])
        loops = [caller for caller in callers if caller[1].opcode == 'while']
        if len(loops) != 1 or owner.home.root.opcode != 'tuple':
            return None
        left = Place(owner.home, owner.home.root).operand(index)
        if _is_element(left, owner.instruction.name, index):
            return _element(program, Place(*loops[0]).operand(0), index, around)
        return left if around else None
    return None


def _is_element(place: Place, owner: str, index: int) -> bool:
    instruction = place.instruction
    is_element = instruction.opcode == 'get-tuple-element' and instruction.operands == (owner,)
    return is_element and instruction.attribute('index') == str(index)


def integer(program: Program, place: Place, device: int) -> int | None:
    """Return a scalar's value on a device, from the device's number and tables.

    None if the text does not determine it, or if it differs between the iterations of a loop.
    """
    place = trace(program, place, around=False)
    instruction = place.instruction
    if instruction.opcode in ('partition-id', 'replica-id'):
        return device
    if instruction.opcode == 'constant':
        numbers = _literal(instruction)
        return numbers[0] if numbers and len(numbers) == 1 else None
    if instruction.opcode == 'dynamic-slice' and len(instruction.operands) == 2:
        return _entry(program, place, device)
    if instruction.opcode in _ARITHMETIC:
        operands = [place.operand(index) for index in range(len(instruction.operands))]
        values = [integer(program, operand, device) for operand in operands]
        known = [value for value in values if value is not None]
        return _ARITHMETIC[instruction.opcode](*known) if len(known) == len(values) else None
    return None


def _entry(program: Program, lookup: Place, device: int) -> int | None:
    """Return the entry that a device reads from a table."""
    table = trace(program, lookup.operand(0), around=False).instruction
    numbers = _literal(table) if table.opcode == 'constant' else None
    index = integer(program, lookup.operand(1), device)
    if numbers is None or index is None or lookup.instruction.results[0].dims:
        return None
    return numbers[min(max(index, 0), len(numbers) - 1)]


def _literal(instruction: Instruction) -> list[int] | None:
    """Return the integers of a constant; None if XLA abbreviated them (`{...}`)."""
    text = instruction.line.partition('constant(')[2].partition(')')[0]
    if not re.fullmatch(r'[{}\d\s,-]+', text):
        return None
    return [int(number) for number in re.findall(r'-?\d+', text)]
