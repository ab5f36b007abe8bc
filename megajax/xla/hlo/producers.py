"""Trace an array back to the instruction that computed its values.

The search looks through copies, tuples and slices, which compute nothing, through loops, which
stack the results of their body, and into fusions.
"""

from collections.abc import Collection
from typing import NamedTuple

from megajax.xla.hlo.op_paths import is_path
from megajax.xla.hlo.program import Computation, Instruction, Program

# Opcodes that move, slice, gather, transpose or cast an array without changing its values.
COPIES = frozenset(
    {
        *('bitcast', 'convert', 'copy', 'copy-done', 'copy-start', 'dynamic-slice', 'reshape'),
        *('slice', 'transpose', 'all-gather', 'all-gather-done', 'all-gather-start'),
    }
)
_UPDATE = 'dynamic-update-slice'
# Parts of the paths with which jax reads and writes slices of stacked arrays.
_OF_STACKS = 'jit(dynamic_index_in_dim)', 'jit(dynamic_update_index_in_dim)'
_MOST_STEPS = 200  # limit of the search, because loops can pass an array around in a circle


class Place(NamedTuple):
    """A result of an instruction; `part` is its index in the tuple, if the result is a tuple."""

    computation: Computation
    instruction: Instruction
    part: tuple[int, ...] = ()


def producer(program: Program, place: Place, through: Collection[str] = ()) -> Place:
    """Return the result that computed an array, looking inside loops and fusions.

    The search looks through copies without a path, reads and writes of stacked arrays, and the
    opcodes in `through`. An array that a loop does not change was produced before the loop. An
    array that a loop fills, such as a stack of layer results, was produced where its slices are
    produced. The result can be a parameter of the program. If the producing instruction has no
    path, the result is the last instruction on the way that has a path.
    """
    named = place
    for _ in range(_MOST_STEPS):
        before = _before(program, place, through)
        if before is None:
            break
        place = before
        named = place if is_path(place.instruction.op_name) else named
    return place if place.instruction.op_name else named


def _before(program: Program, place: Place, through: Collection[str]) -> Place | None:
    """Return the result of which an array is an unchanged copy; None if it is computed here."""
    computation, instruction, part = place
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == 'parameter':
        return _outside(program, place)
    if opcode == 'while' and part:
        return _of_loop(program, computation, instruction, part)
    if opcode == 'get-tuple-element':
        number = int(instruction.attribute('index') or 0)
        return Place(computation, computation.by_name[operands[0]], (number, *part))
    if opcode == 'tuple' and part:
        return Place(computation, computation.by_name[operands[part[0]]], part[1:])
    if opcode == 'opt-barrier':
        return Place(computation, computation.by_name[operands[0]], part)
    if opcode in ('fusion', 'call'):
        inside = program.computations[instruction.called[0]]
        return Place(inside, inside.root, part)
    if opcode == _UPDATE:
        return Place(computation, computation.by_name[operands[1]])
    if filled := _filled_by_loop(program, computation, instruction):
        return filled
    if opcode in through or (opcode in COPIES and not _is_own(instruction.op_name)):
        return Place(computation, computation.by_name[operands[0]])
    return None


def _is_own(op_name: str) -> bool:
    """Return whether a path names a computation, and not an access to a stack of results."""
    return is_path(op_name) and not any(name in op_name for name in _OF_STACKS)


def _outside(program: Program, place: Place) -> Place | None:
    """Return the argument for a computation's parameter; None for the program's parameters."""
    callers = program.callers.get(place.computation.name)
    if not callers:
        return None
    outside, caller = callers[0]
    number = int(place.instruction.inputs)
    if caller.opcode == 'while':
        return _of_loop(program, outside, caller, place.part) if place.part else None
    if caller.opcode == 'conditional':
        number += 1 + [*caller.called].index(place.computation.name)
    if number >= len(caller.operands):
        return None
    return Place(outside, outside.by_name[caller.operands[number]], place.part)


def _of_loop(
    program: Program, computation: Computation, loop: Instruction, part: tuple[int, ...]
) -> Place | None:
    """Return the body's result for a carried array, or its initial value if it never changes."""
    body = program.computations[loop.attribute('body') or '']
    if body.root.opcode != 'tuple':
        return None
    made = body.by_name[body.root.operands[part[0]]]
    is_kept = (
        made.opcode == 'get-tuple-element'
        and body.by_name[made.operands[0]].opcode == 'parameter'
        and made.attribute('index') == str(part[0])
    )
    if is_kept:
        return Place(computation, computation.by_name[loop.operands[0]], part)
    return Place(body, made, part[1:])


def _filled_by_loop(
    program: Program, computation: Computation, instruction: Instruction
) -> Place | None:
    """Return the values that a loop writes into a constant-filled array, or None."""
    if instruction.opcode not in ('broadcast', 'constant'):
        return None
    while caller := _caller_of_fusion(program, computation, instruction):
        computation, instruction = caller
    for user in computation.users.get(instruction.name, ()):
        for loop in computation.users.get(user.name, ()):
            if user.opcode == 'tuple' and loop.opcode == 'while':
                number = user.operands.index(instruction.name)
                made = _of_loop(program, computation, loop, (number,))
                if made is not None and made.computation is not computation:
                    return made
    return None


def _caller_of_fusion(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction] | None:
    callers = program.callers.get(computation.name, [])
    is_root = instruction.is_root and len(callers) == 1 and callers[0][1].opcode == 'fusion'
    return callers[0] if is_root else None
