"""Interpret collectives that XLA's CPU backend cannot express.

The CPU backend has no reduce-scatter, and reduces and moves 16-bit and FP8 arrays as wider types.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megajax.xla.hlo.evaluate import run_of
from megajax.xla.hlo.groups import Groups
from megajax.xla.hlo.op_paths import SAME
from megajax.xla.hlo.program import DTYPE_BITS, Array, Computation, Instruction, Program
from megajax.xla.hlo.transfers import Sent

# Steps of a computation, or levels of fusions, in which the operands of a sum are converted.
STEPS_BACK = 12
# The dtypes that XLA for CPUs widens to each dtype on the wire.
_NARROW = {'f32': {'bf16', 'f16'}, 'f16': {dtype for dtype in DTYPE_BITS if dtype.startswith('f8')}}


def as_meant(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    sent: Sent,
    groups: Groups,
) -> tuple[str, Array, Array]:
    """Return the kind, operand and result of a collective as a GPU would have them.

    They differ from the text only in programs for CPUs, which are recognized because XLA for CPUs
    never makes a collective asynchronous and never configures one, and in fusions for TPUs, which
    send what a reduce-scatter sends.
    """
    index, operand, result = sent
    if (
        instruction.opcode.endswith('-start')
        or '"collective_backend_config"' in instruction.attributes
        or (program.is_for_tpu and program.fusion_of(computation) is None)
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
        if operand.dtype in _NARROW and not program.is_for_tpu
        else ''
    )
    if dtype:
        operand, result = operand._replace(dtype=dtype), result._replace(dtype=dtype)
    # A sum that the author wrote stays a sum on every backend, no matter which part of it is read.
    is_authors = re.search(r'/psum\w*$', instruction.op_name)
    if (
        kind == 'all-reduce'
        and not is_authors
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
    """Return the smaller dtype that a GPU would send; empty if a GPU would send the same dtype."""
    operand = computation.by_name[instruction.operands[index]]
    before, narrow = _dtype_before(program, computation, operand), _NARROW[operand.results[0].dtype]
    after = set[str]()
    for reader in readers:
        is_part = not reader.dtype and reader.instruction.opcode == 'dynamic-slice'
        after |= (
            {each.dtype for each in _readers(program, reader.home, reader.instruction)}
            if is_part
            else {reader.dtype}
        )
    reduction = instruction.attribute('to_apply')
    if reduction is None:  # moved without a reduction
        return before if before in narrow and after == {before} else ''
    # Partial sums of a matmul are in fp32 on CPUs, and in the matmul's dtype elsewhere. A sum that
    # the author wrote has the dtype that the author chose, and so has a sum of fp32 numbers.
    is_authors = (
        re.search(r'/(psum|reduce_scatter)\w*$', instruction.op_name)
        and '_promoted' not in reduction
    )
    if len(after) != 1 or not after <= narrow or is_authors:
        return ''
    (dtype,) = after
    return dtype if _comes_from(program, computation, operand, dtype) else ''


def _comes_from(
    program: Program, computation: Computation, producer: Instruction, dtype: str
) -> bool:
    """Return whether an array is computed from arrays of a dtype within STEPS_BACK steps."""
    values = {(computation.name, producer.name): (computation, producer)}
    for _ in range(STEPS_BACK):
        before = []
        for home, value in values.values():
            if any(result.dtype == dtype for result in value.results):
                return True
            if value.opcode in ('fusion', 'call'):
                inside = program.computations[value.called[0]]
                before.append((inside, inside.root))
            elif given := _given(program, home, value):
                before.append(given)
            else:
                before += [(home, home.by_name[x]) for x in value.operands if x in home.by_name]
        values = {(home.name, value.name): (home, value) for home, value in before}
    return False


class _Reader(NamedTuple):
    """A reader of an array: the instruction, its computation, and the array's first other dtype.

    An instruction that returns the array counts as a reader. The dtype is empty if the array was
    not converted.
    """

    instruction: Instruction
    home: Computation
    dtype: str


def _readers(
    program: Program,
    computation: Computation,
    producer: Instruction,
    index: int | None = None,
    dtype: str = '',
) -> Iterator[_Reader]:
    """Yield the readers of an array or of a tuple's element, past instructions that pass it on."""
    if producer is computation.root:
        yield _Reader(producer, computation, dtype)
    for user in computation.users.get(producer.name, ()):
        if index is not None and (
            user.opcode != 'get-tuple-element' or user.attribute('index') != str(index)
        ):
            continue
        if user.opcode in ('fusion', 'call'):
            inside = program.computations[user.called[0]]
            for place in (
                place for place, name in enumerate(user.operands) if name == producer.name
            ):
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


def _dtype_before(program: Program, computation: Computation, producer: Instruction) -> str:
    """Return the dtype of an array before its conversion; empty if it was not converted."""
    while producer.opcode in {*SAME, 'slice', 'dynamic-slice'} - {'get-tuple-element'}:
        before = computation.by_name[producer.operands[0]]
        if producer.opcode == 'convert':
            return before.results[0].dtype
        producer = before
    if producer.opcode == 'fusion':
        inside = program.computations[producer.called[0]]
        return _dtype_before(program, inside, inside.root)
    given = _given(program, computation, producer)
    return _dtype_before(program, *given) if given else ''


def _is_own_part(program: Program, reader: _Reader, groups: Groups) -> bool:
    """Return whether each device reads the shard at its index in its group, along one dim."""
    if reader.instruction.opcode != 'dynamic-slice':
        return False
    array, *starts = reader.instruction.operands
    full, part = reader.home.by_name[array].results[0].shape, reader.instruction.results[0].shape
    cut = [dim for dim, (size, own) in enumerate(zip(full, part, strict=True)) if size != own]
    if len(cut) != 1 or any(full[cut[0]] != part[cut[0]] * len(group) for group in groups):
        return False
    for group in groups:
        for place, device in enumerate(group):
            start = run_of(program, reader.home, device).value(starts[cut[0]])
            if (
                start is None
                or min(max(int(start), 0), full[cut[0]] - part[cut[0]]) != place * part[cut[0]]
            ):
                return False
    return True


def _given(
    program: Program, computation: Computation, producer: Instruction
) -> tuple[Computation, Instruction] | None:
    """Return the value that a caller passes for a fusion's parameter or a loop's carried value.

    The value is returned as its computation and instruction; None for any other instruction.
    """
    is_carried = (
        producer.opcode == 'get-tuple-element'
        and computation.by_name[producer.operands[0]].opcode == 'parameter'
    )
    for caller, call in (
        program.callers.get(computation.name, ())
        if is_carried or producer.opcode == 'parameter'
        else ()
    ):
        if producer.opcode == 'parameter' and call.opcode in ('fusion', 'call'):
            place = next(
                place
                for place, parameter in computation.parameters.items()
                if parameter is producer
            )
            return caller, caller.by_name[call.operands[place]]
        if is_carried and call.opcode == 'while':
            carried = caller.by_name[call.operands[0]]
            if carried.opcode == 'tuple':
                index = int(producer.attribute('index') or 0)
                return caller, caller.by_name[carried.operands[index]]
    return None
