"""What XLA's CPU backend cannot say, read as what it means: it does not make reduce-scatters, and reduces and moves in fp32 alone."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megajax.hlo.evaluate import run_of
from megajax.hlo.groups import Groups
from megajax.hlo.paths import SAME
from megajax.hlo.program import DTYPE_BITS, Array, Computation, Instruction, Program
from megajax.hlo.transfers import Sent

# What an XLA for CPUs widens to a dtype on its way.
_NARROW = {'f32': {'bf16', 'f16'}, 'f16': {dtype for dtype in DTYPE_BITS if dtype.startswith('f8')}}


def as_meant(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    sent: Sent,
    groups: Groups,
) -> tuple[str, Array, Array]:
    """Kind, operand and result; only an XLA for CPUs hides them, and it starts nothing in the background and configures nothing."""
    index, operand, result = sent
    if (
        instruction.opcode.endswith('-start')
        or '"collective_backend_config"' in instruction.attributes
    ):
        return kind, operand, result
    readers = list(
        _readers(
            program,
            computation,
            instruction,
            index if len(instruction.results) > 1 and kind != 'all-to-all' else None,
        )
    )
    dtype = (
        _narrow_dtype(program, computation, instruction, index, readers)
        if operand.dtype in _NARROW
        else ''
    )
    if dtype:
        operand, result = operand._replace(dtype=dtype), result._replace(dtype=dtype)
    # A sum that the author wrote stays one on every backend, whatever is taken of it.
    is_own = re.search(r'/psum\w*$', instruction.op_name)
    if (
        kind == 'all-reduce'
        and not is_own
        and readers
        and all(_is_own_part(program, reader, groups) for reader in readers)
    ):
        return (
            'reduce-scatter',
            operand,
            result._replace(shape=readers[0].instruction.results[0].shape),
        )
    return kind, operand, result


def _narrow_dtype(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    index: int,
    readers: Sequence['_Reader'],
) -> str:
    """The smaller dtype that an array has on its way; empty where it has its own."""
    operand = computation.by_name[instruction.operands[index]]
    before, narrow = _dtype_before(program, computation, operand), _NARROW[operand.results[0].dtype]
    after = set[str]()
    for reader in readers:
        is_part = not reader.dtype and reader.instruction.opcode == 'dynamic-slice'
        after |= (
            {one.dtype for one in _readers(program, reader.home, reader.instruction)}
            if is_part
            else {reader.dtype}
        )
    reduction = instruction.attribute('to_apply')
    if reduction is None:  # moved as it is
        return before if before in narrow and after == {before} else ''
    # Partial sums of a product are in fp32 here and in the product's dtype elsewhere; a sum that the author wrote is as written.
    is_own = (
        re.search(r'/(psum|reduce_scatter)\w*$', instruction.op_name)
        and '_promoted' not in reduction
    )
    return next(iter(after)) if len(after) == 1 and after <= narrow and not is_own else ''


class _Reader(NamedTuple):
    """Who reads an array, where, and the first dtype that it was converted to before; what returns it counts as its reader."""

    instruction: Instruction
    home: Computation
    dtype: str


def _readers(
    program: Program,
    computation: Computation,
    made: Instruction,
    index: int | None = None,
    dtype: str = '',
) -> Iterator[_Reader]:
    """The readers of an array, or of one in a tuple, whatever hands it on between."""
    if made is computation.root:
        yield _Reader(made, computation, dtype)
    for user in computation.users.get(made.name, ()):
        if index is not None and (
            user.opcode != 'get-tuple-element' or user.attribute('index') != str(index)
        ):
            continue
        if user.opcode in ('fusion', 'call'):
            inside = program.computations[user.called[0]]
            for place in (place for place, name in enumerate(user.operands) if name == made.name):
                for reader in _readers(program, inside, inside.parameters[place], None, dtype):
                    if reader.instruction is inside.root and reader.instruction.opcode in {
                        *SAME,
                        'parameter',
                    }:
                        yield from _readers(program, computation, user, None, reader.dtype)
                    else:
                        yield reader
        elif user.opcode in SAME:
            to = user.results[0].dtype if user.opcode == 'convert' and not dtype else dtype
            yield from _readers(program, computation, user, None, to)
        else:
            yield _Reader(user, computation, dtype)


def _dtype_before(program: Program, computation: Computation, made: Instruction) -> str:
    """Of an array before the conversion that made it; empty where none did."""
    while made.opcode in {*SAME, 'slice', 'dynamic-slice'} - {'get-tuple-element'}:
        before = computation.by_name[made.operands[0]]
        if made.opcode == 'convert':
            return before.results[0].dtype
        made = before
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        return _dtype_before(program, inside, inside.root)
    given = _given(program, computation, made)
    return _dtype_before(program, *given) if given else ''


def _is_own_part(program: Program, reader: _Reader, groups: Groups) -> bool:
    """Whether each device takes the part at its place in its group, along one dim."""
    if reader.instruction.opcode != 'dynamic-slice':
        return False
    array, *starts = reader.instruction.operands
    whole, part = (one.results[0].shape for one in (reader.home.by_name[array], reader.instruction))
    cut = [dim for dim, (size, own) in enumerate(zip(whole, part, strict=True)) if size != own]
    if len(cut) != 1 or any(whole[cut[0]] != part[cut[0]] * len(group) for group in groups):
        return False
    for group in groups:
        for place, device in enumerate(group):
            start = run_of(program, reader.home, device).value(starts[cut[0]])
            if (
                start is None
                or min(max(int(start), 0), whole[cut[0]] - part[cut[0]]) != place * part[cut[0]]
            ):
                return False
    return True


def _given(
    program: Program, computation: Computation, made: Instruction
) -> tuple[Computation, Instruction] | None:
    """What a caller gives for a parameter of a fusion, or a loop for one of what it carries."""
    is_carried = (
        made.opcode == 'get-tuple-element'
        and computation.by_name[made.operands[0]].opcode == 'parameter'
    )
    for caller, one in (
        program.callers.get(computation.name, ())
        if is_carried or made.opcode == 'parameter'
        else ()
    ):
        if made.opcode == 'parameter' and one.opcode in ('fusion', 'call'):
            place = next(
                place for place, parameter in computation.parameters.items() if parameter is made
            )
            return caller, caller.by_name[one.operands[place]]
        if (
            is_carried
            and one.opcode == 'while'
            and caller.by_name[one.operands[0]].opcode == 'tuple'
        ):
            return caller, caller.by_name[
                caller.by_name[one.operands[0]].operands[int(made.attribute('index') or 0)]
            ]
    return None
