"""The transfers of one instruction: the kind of collective, the arrays, and a ring's bytes."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Array, Computation, Instruction

KINDS = (
    'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all',
    'collective-permute', 'collective-broadcast',
)  # fmt: skip
_KIND = re.compile(rf'({"|".join(sorted(KINDS, key=len, reverse=True))})(-start)?')
_END = re.compile(rf'({"|".join(KINDS)})-(update|done)')
_SPLIT_BY = (
    'xla_gpu_enable_pipelined_p2p or xla_gpu_experimental_pipeline_parallelism_opt_level, which is '
    'not supported; remove the option'
)
# libtpu writes a collective between slices as a transfer from and to the host.
_BETWEEN_SLICES = '"xla_megascale_runtime"'


class Sent(NamedTuple):
    """One array of a collective: its operand index, and the operand and result on a device."""

    place: int
    operand: Array
    result: Array


def kind_of(instruction: Instruction) -> str | None:
    """Return the kind of collective that an instruction is or starts; None for other instructions.

    Raises HloError for an unknown kind of collective, and for a transfer between slices of TPUs.
    """
    if match := _KIND.fullmatch(instruction.opcode):
        return match[1]
    opcode = instruction.opcode
    is_other = opcode.startswith(KINDS) and not _END.fullmatch(opcode)
    if opcode == 'send' and _BETWEEN_SLICES in instruction.attributes:
        raise HloError(f'a transfer between slices, which is not supported: {instruction.line}')
    if opcode == 'send' and 'is_host_transfer=true' not in instruction.attributes:
        raise HloError(f'a permute split by {_SPLIT_BY}: {instruction.line}')
    if is_other:
        raise HloError(f'a collective that is not understood: {instruction.line}')
    return None


def arrays_of(computation: Computation, instruction: Instruction) -> list[Sent]:
    """Return the arrays that an instruction sends."""
    inputs = [computation.by_name[name].results[0] for name in instruction.operands]
    results = instruction.results
    if len(results) >= 2 * len(inputs) and instruction.opcode.endswith('-start'):
        results = results[len(inputs) :]  # (operands, results, contexts)
    if instruction.opcode.startswith('ragged') and len(inputs) == 6:
        # The operands are the array, its destination, and four tables of offsets and sizes, which
        # are not sent.
        return [Sent(0, inputs[0], inputs[1])]
    if not inputs or len(results) < len(inputs):
        raise HloError(f'a collective whose operands are not understood: {instruction.line}')
    if instruction.opcode.startswith('all-to-all') and len(inputs) > 1:
        # One array, cut into a part for each device.
        parts = inputs[0], results[0]
        return [Sent(0, *(part._replace(shape=(len(inputs), *part.shape)) for part in parts))]
    return [Sent(index, *pair) for index, pair in enumerate(zip(inputs, results, strict=False))]


def ring_bytes(kind: str, array: Array, size: int) -> float:
    """Return the bytes that each of `size` devices sends of an array, with the ring algorithm.

    The array is a result of `whole_of`.
    """
    if size < 2:
        return 0
    if kind in ('collective-permute', 'collective-broadcast', 'ragged-all-to-all'):
        return array.bytes
    return (2 if kind == 'all-reduce' else 1) * (size - 1) / size * array.bytes


def whole_of(kind: str, operand: Array, result: Array) -> Array:
    """Return the gathered, reduced or scattered array; for a ragged all-to-all, an upper bound."""
    if kind == 'ragged-all-to-all' or operand.bytes >= result.bytes:
        return operand
    return result


def widest(groups: Sequence[Sequence[int]]) -> int:
    """Return the number of distinct devices in the largest group."""
    return max((len({*group}) for group in groups), default=0)
