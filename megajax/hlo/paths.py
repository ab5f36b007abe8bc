"""Where an array in a compiled program comes from and where it goes, by the paths that jax gave to what makes and reads it."""

import re
from math import prod

from megajax.hlo.products import flops
from megajax.hlo.program import Computation, Instruction, Program

# What hands an array on as it is, or in another layout or dtype.
SAME = {
    'bitcast',
    'copy',
    'reshape',
    'transpose',
    'convert',
    'get-tuple-element',
    'optimization-barrier',
    'copy-start',
    'copy-done',
}


def joined(program: Program, computation: Computation, made: Instruction) -> list[Instruction]:
    """The parts of a flat buffer that XLA made to send them at once; what the author joined is one array."""
    while made.opcode in SAME and len(made.operands) == 1 and made.opcode != 'get-tuple-element':
        made = computation.by_name[made.operands[0]]
    root = made
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        root = inside.root if len(inside.instructions) == len(inside.parameters) + 1 else made
    is_flat = (
        root.opcode == 'concatenate'
        and len(root.results[0].shape) == 1
        and not root.op_name.endswith('/concatenate')
    )
    return [_before_reshapes(computation, name) for name in made.operands] if is_flat else [made]


def _before_reshapes(computation: Computation, name: str) -> Instruction:
    made = computation.by_name[name]
    while made.opcode in ('bitcast', 'reshape'):
        made = computation.by_name[made.operands[0]]
    return made


def origin(program: Program, computation: Computation, made: Instruction, depth: int = 24) -> str:
    """The path of an array, or of the nearest before it that has one."""
    if depth == 0 or is_path(made.op_name):
        return made.op_name
    if made.opcode == 'get-tuple-element':
        index, owner = int(made.attribute('index') or 0), computation.by_name[made.operands[0]]
        body = owner.attribute('body') if owner.opcode == 'while' else None
        if body is not None:
            inside = program.computations[body]
            if inside.root.opcode == 'tuple':
                return origin(
                    program, inside, inside.by_name[inside.root.operands[index]], depth - 1
                )
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        if name := next(
            (one.op_name for one in reversed(inside.instructions) if is_path(one.op_name)), ''
        ):
            return name
    before = [computation.by_name[name] for name in made.operands]
    if (start := _slice_start(program, made)) is not None:
        before = [_part_at(program, computation, before[0], start)]
    return next(
        (name for one in before if (name := origin(program, computation, one, depth - 1))), ''
    )


def paths(op_name: str, count: int) -> list[str]:
    """The path of each operand: of joined ones XLA writes `before/(first:second)/after`, where it writes any."""
    if count == 1:
        return [op_name if is_path(op_name) else '']
    joined = re.search(r'\(([^():]+(?::[^():]+)+)\)', op_name)
    parts = joined[1].split(':') if joined else []
    if joined is None or len(parts) != count:
        return [''] * count
    return [op_name[: joined.start()] + part + op_name[joined.end() :] for part in parts]


def is_path(op_name: str) -> bool:
    """Not of what XLA itself named, nor of a loop, which says nothing of what it returns."""
    return '/' in op_name and not op_name.endswith('/while')


def destination(program: Program, computation: Computation, made: Instruction, index: int) -> str:
    """The path of the first matrix product that reads an array, one of several that `made` has, or of the first reader at all.

    What only keeps it for later or adds it to a sum is no reader.
    """
    first, ahead = '', [made]
    for one in ahead:
        for user in computation.users.get(one.name, ()):
            if (
                user.opcode == 'get-tuple-element'
                and len(made.operands) > 1
                and user.attribute('index') != str(index)
            ):
                continue
            if is_path(user.op_name) and flops(program, computation, user):
                return user.op_name
            if user.opcode in SAME or user.opcode.endswith('-done') or user.opcode == 'fusion':
                ahead.append(user)
            hands_on = user.opcode in SAME or user.opcode.endswith('-done')
            if (
                not hands_on
                and is_path(user.op_name)
                and not user.op_name.endswith(('/dynamic_update_slice', '/add'))
            ):
                first = first or user.op_name
    return first


def _slice_start(program: Program, made: Instruction) -> int | None:
    """Where a slice of a flat buffer begins."""
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        made = inside.root if len(inside.instructions) == 2 else made
    found = (
        re.search(r'slice=\{\[(\d+):\d+\]\}', made.attributes) if made.opcode == 'slice' else None
    )
    return int(found[1]) if found else None


def _part_at(
    program: Program, computation: Computation, buffer: Instruction, start: int
) -> Instruction:
    """What lies at a place of a flat buffer that was reduced as a whole."""
    while buffer.opcode in SAME or buffer.opcode.startswith('all-reduce'):
        buffer = computation.by_name[buffer.operands[0]]
    end = 0
    for part in joined(program, computation, buffer):
        end += prod(part.results[0].shape)
        if start < end:
            return part
    return buffer
