"""Follow a value of a compiled program back to what computes it, through fusions, loops and copies; integers device by device."""

import re
from collections.abc import Callable
from typing import NamedTuple

from megajax.hlo.program import Computation, Instruction, Program

MAX_DEPTH = 64  # steps back; no chain of copies is as long
# What hands a value on with its numbers as they are.
_SAME = {
    'bitcast', 'copy', 'reshape', 'optimization-barrier', 'copy-start', 'copy-done', 'recv-done', 'async-done', 'fusion-done',
    'all-reduce-done', 'collective-permute-done', 'all-gather-done', 'reduce-scatter-done', 'domain',
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


class Place(NamedTuple):
    """An instruction and the computation that it stands in."""

    home: Computation
    instruction: Instruction

    def operand(self, index: int) -> 'Place':
        """What one of its operands names."""
        return Place(self.home, self.home.by_name[self.instruction.operands[index]])


def trace(program: Program, place: Place, *, through: frozenset[str] = frozenset()) -> Place:
    """The instruction that computes a value: past copies, fusions, calls, tuples and what a loop carries, and past `through`."""
    for _ in range(MAX_DEPTH):
        before = _before(program, place, through)
        if before is None:
            return place
        place = before
    return place


def _before(program: Program, place: Place, through: frozenset[str]) -> Place | None:
    home, instruction = place
    if instruction.opcode == 'parameter':
        return _given(program, place)
    if instruction.opcode in ('fusion', 'call') and len(instruction.results) == 1:
        inside = program.computations[instruction.called[0]]
        return Place(inside, inside.root)
    if instruction.opcode == 'fusion-start' or instruction.opcode == 'async-start':
        inside = program.computations[instruction.called[0]]
        return Place(inside, inside.root)
    if instruction.opcode == 'get-tuple-element':
        return _element(program, place.operand(0), int(instruction.attribute('index') or 0))
    if instruction.opcode in _SAME or instruction.opcode in through:
        return place.operand(0)
    return None


def _given(program: Program, place: Place) -> Place | None:
    """What the one fusion or call that runs a computation gives for its parameter."""
    callers = program.callers.get(place.home.name, [])
    number = next(number for number, one in place.home.parameters.items() if one is place.instruction)
    if len(callers) == 1 and callers[0][1].opcode in ('fusion', 'call', 'fusion-start', 'async-start'):
        return Place(*callers[0]).operand(number)
    return None


def _element(program: Program, owner: Place, index: int) -> Place | None:
    """One element of a tuple; of what a loop carries, the value that an iteration leaves, or the first if no iteration changes it."""
    instruction = owner.instruction
    if instruction.opcode == 'tuple':
        return owner.operand(index)
    if instruction.opcode in ('fusion', 'call'):
        inside = program.computations[instruction.called[0]]
        return _element(program, Place(inside, inside.root), index)
    if instruction.opcode == 'recv-done' and index == 0:
        return owner.operand(0)
    if instruction.opcode == 'parameter':
        loops = [(home, one) for home, one in program.callers.get(owner.home.name, []) if one.opcode == 'while']
        if len(loops) != 1 or owner.home.root.opcode != 'tuple':
            return None
        left = Place(owner.home, owner.home.root).operand(index)
        if _is_element(left, owner.instruction.name, index):
            return _element(program, Place(*loops[0]).operand(0), index)
        return left
    return None


def _is_element(place: Place, owner: str, index: int) -> bool:
    instruction = place.instruction
    is_element = instruction.opcode == 'get-tuple-element' and instruction.operands == (owner,)
    return is_element and instruction.attribute('index') == str(index)


def depends_on_device(program: Program, place: Place, depth: int = MAX_DEPTH) -> bool:
    """Whether a small integer is computed from the device's own number."""
    place = trace(program, place)
    if place.instruction.opcode in ('partition-id', 'replica-id'):
        return True
    count = len(place.instruction.operands)
    return depth > 0 and any(depends_on_device(program, place.operand(index), depth - 1) for index in range(count))


def integer(program: Program, place: Place, device: int) -> int | None:
    """A scalar of a device, computed from its number and from tables in the text; None where the text does not say."""
    home, instruction = place = trace(program, place)
    if instruction.opcode in ('partition-id', 'replica-id'):
        return device
    if instruction.opcode == 'constant':
        numbers = _literal(instruction)
        return numbers[0] if numbers and len(numbers) == 1 else None
    if instruction.opcode == 'dynamic-slice' and len(instruction.operands) == 2:
        table, index = trace(program, place.operand(0)), integer(program, place.operand(1), device)
        numbers = _literal(table.instruction) if table.instruction.opcode == 'constant' else None
        if numbers is None or index is None or instruction.results[0].dims:
            return None
        return numbers[min(max(index, 0), len(numbers) - 1)]
    if instruction.opcode in _ARITHMETIC:
        values = [integer(program, Place(home, home.by_name[name]), device) for name in instruction.operands]
        known = [value for value in values if value is not None]
        return _ARITHMETIC[instruction.opcode](*known) if len(known) == len(values) else None
    return None


def _literal(instruction: Instruction) -> list[int] | None:
    """The integers of a constant; None where XLA has left them out (`{...}`)."""
    text = instruction.line.split('constant(', 1)[1].split(')', 1)[0]
    return [int(number) for number in re.findall(r'-?\d+', text)] if re.fullmatch(r'[{}\d\s,-]+', text) else None
