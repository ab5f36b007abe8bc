"""Find the producer and the reader of an array by the paths that jax recorded.

A path names the transformations and scopes of an instruction.
"""

import re
from collections.abc import Iterator
from math import prod

from megajax.xla.hlo.products import flops
from megajax.xla.hlo.program import Computation, Instruction, Program

# Opcodes that pass an array on unchanged, or in a different layout or dtype.
SAME = {
    'bitcast',
    'copy',
    'reshape',
    'transpose',
    'convert',
    'get-tuple-element',
    'opt-barrier',
    'copy-start',
    'copy-done',
}


def joined(program: Program, computation: Computation, producer: Instruction) -> list[Instruction]:
    """Return the parts of a flat buffer into which XLA joined arrays to send them together.

    Any other array, even one that the author concatenated, is returned as a single part.
    """
    while (
        producer.opcode in SAME
        and len(producer.operands) == 1
        and producer.opcode != 'get-tuple-element'
    ):
        producer = computation.by_name[producer.operands[0]]
    root = producer
    if producer.opcode == 'fusion':
        inside = program.computations[producer.called[0]]
        root = inside.root if len(inside.instructions) == len(inside.parameters) + 1 else producer
    is_flat = (
        root.opcode == 'concatenate'
        and len(root.results[0].shape) == 1
        and not root.op_name.endswith('/concatenate')
    )
    return (
        [_before_reshapes(computation, name) for name in producer.operands]
        if is_flat
        else [producer]
    )


def _before_reshapes(computation: Computation, name: str) -> Instruction:
    producer = computation.by_name[name]
    while producer.opcode in ('bitcast', 'reshape'):
        producer = computation.by_name[producer.operands[0]]
    return producer


def origin(
    program: Program, computation: Computation, producer: Instruction, depth: int = 24
) -> str:
    """Return the path of an array, or of its nearest predecessor with a path; empty if none."""
    if depth == 0 or is_path(producer.op_name):
        return producer.op_name
    if producer.opcode == 'get-tuple-element':
        index = int(producer.attribute('index') or 0)
        owner = computation.by_name[producer.operands[0]]
        body = owner.attribute('body') if owner.opcode == 'while' else None
        if body is not None:
            inside = program.computations[body]
            if inside.root.opcode == 'tuple':
                return origin(
                    program, inside, inside.by_name[inside.root.operands[index]], depth - 1
                )
    if producer.opcode == 'fusion':
        inside = program.computations[producer.called[0]]
        if name := next(
            (each.op_name for each in reversed(inside.instructions) if is_path(each.op_name)), ''
        ):
            return name
    before = [computation.by_name[name] for name in producer.operands]
    if (start := _slice_start(program, producer)) is not None:
        before = [_part_at(program, computation, before[0], start)]
    return next(
        (name for each in before if (name := origin(program, computation, each, depth - 1))), ''
    )


def paths(op_name: str, count: int) -> list[str]:
    """Return the path of each of `count` operands of an instruction.

    For joined operands, XLA writes `before/(first:second)/after`, if it writes paths at all.
    """
    if count == 1:
        return [op_name if is_path(op_name) else '']
    for before, inside, after in _groups(op_name):
        if len(parts := _apart(inside)) == count:
            return [before + part + after for part in parts]
    return [''] * count


def _groups(op_name: str) -> Iterator[tuple[str, str, str]]:
    """Yield what is before, inside and after each pair of parentheses."""
    starts = list[int]()
    for at, letter in enumerate(op_name):
        if letter == '(':
            starts.append(at)
        elif letter == ')' and starts:
            start = starts.pop()
            yield op_name[:start], op_name[start + 1 : at], op_name[at + 1 :]


def _apart(names: str) -> list[str]:
    """Split names at the colons that are outside parentheses."""
    parts, depth = [''], 0
    for letter in names:
        depth += {'(': 1, ')': -1}.get(letter, 0)
        if letter == ':' and not depth:
            parts.append('')
        else:
            parts[-1] += letter
    return parts


def is_path(op_name: str) -> bool:
    """Return whether a name is a path that jax recorded for an instruction other than a loop.

    The path of a loop does not describe the arrays that the loop returns.
    """
    return '/' in op_name and not op_name.endswith('/while')


def destination(
    program: Program, computation: Computation, producer: Instruction, index: int
) -> str:
    """Return the path of the first matmul that reads an array, or else of its first reader.

    `index` is the index of the array in the results of `producer`. A matmul that reads the array
    in any layout or dtype precedes one that reads what a fusion computes from it. Some instructions
    do not count as readers: those that only store the array for later or add it to a sum, and those
    that jax 0.12 names after an unnamed call. A matmul to which XLA gave the path of the next
    operation counts only if no other matmul reads the array.
    """
    first, product = '', ''
    ahead, known = [producer], {producer.name}
    while ahead:
        products, behind = dict[str, str](), list[Instruction]()
        for source in ahead:
            for user in computation.users.get(source.name, ()):
                if len(producer.operands) > 1 and _is_other_part(user, index):
                    continue
                has_path = is_path(user.op_name) and not user.op_name.endswith('/jit')
                if has_path and flops(program, computation, user):
                    if user.op_name.endswith('/dot_general'):
                        products[user.name] = user.op_name
                    product = product or user.op_name
                passes_on = user.opcode in SAME or user.opcode.endswith('-done')
                if (passes_on or user.opcode == 'fusion') and user.name not in known:
                    is_same = passes_on or _only_moves(program, user)
                    (ahead if is_same else behind).append(user)
                    known.add(user.name)
                adds = user.op_name.endswith(('/dynamic_update_slice', '/add'))
                if not passes_on and has_path and not adds:
                    first = first or user.op_name
        if products:  # the text is in the order of the schedule
            return products[min(products, key=computation.place_of.__getitem__)]
        ahead = behind
    return product or first


def _is_other_part(user: Instruction, index: int) -> bool:
    """Return whether an instruction takes another array than this from a tuple."""
    return user.opcode == 'get-tuple-element' and user.attribute('index') != str(index)


def _only_moves(program: Program, fusion: Instruction) -> bool:
    """Return whether a fusion returns an array unchanged, or in a different layout or dtype."""
    inside = program.computations[fusion.called[0]]
    return all(each.opcode in SAME or each.opcode == 'parameter' for each in inside.instructions)


def _slice_start(program: Program, producer: Instruction) -> int | None:
    """Return the start of a slice of a flat buffer; None for any other instruction."""
    if producer.opcode == 'fusion':
        inside = program.computations[producer.called[0]]
        producer = inside.root if len(inside.instructions) == 2 else producer
    match = (
        re.search(r'slice=\{\[(\d+):\d+\]\}', producer.attributes)
        if producer.opcode == 'slice'
        else None
    )
    return int(match[1]) if match else None


def _part_at(
    program: Program, computation: Computation, buffer: Instruction, start: int
) -> Instruction:
    """Return the part of a flat buffer (possibly reduced as one) that contains element `start`."""
    while buffer.opcode in SAME or buffer.opcode.startswith('all-reduce'):
        buffer = computation.by_name[buffer.operands[0]]
    end = 0
    for part in joined(program, computation, buffer):
        end += prod(part.results[0].shape)
        if start < end:
            return part
    return buffer
