"""The collectives of a compiled program: each array that crosses the wire, how often, along which axes, and what runs meanwhile."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from math import prod

from megajax.hlo.cpu_readings import as_meant
from megajax.hlo.groups import Groups, axes_of, device_groups
from megajax.hlo.paths import destination, joined, origin, paths
from megajax.hlo.program import Array, Computation, HloError, Instruction, Program
from megajax.hlo.schedule import overlap

KINDS = (
    'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all', 'collective-permute', 'collective-broadcast'
)  # fmt: skip
_KIND = re.compile(rf'({"|".join(sorted(KINDS, key=len, reverse=True))})(-start)?')
_END = re.compile(rf'({"|".join(KINDS)})-(update|done)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One array that crosses the wire; XLA may have joined several in one instruction (`instruction` is the same then).

    `operand` and `result` are a device's own. `op_name` is that of the array, or of what made it. `overlapped_flops` are of the matrix
    products that run between start and end, on one device; `synchronous` says that nothing can.
    """

    kind: str
    axes: tuple[str, ...]
    groups: Groups
    operand: Array
    result: Array
    times: int
    in_unbounded_loop: bool
    op_name: str
    source: str
    computation: str
    instruction: str
    synchronous: bool
    overlapped_flops: int

    @property
    def axis(self) -> str:
        """`data`, `model`, `data+model`."""
        return '+'.join(self.axes)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends each time."""
        return ring_bytes(self.kind, self.whole, max(len(group) for group in self.groups))

    @property
    def whole(self) -> Array:
        """The larger of operand and result: what is gathered, reduced or scattered."""
        return max(self.operand, self.result, key=lambda array: array.bytes)

    @property
    def is_scalar(self) -> bool:
        """Whether it carries one number."""
        return not self.operand.dims


def ring_bytes(kind: str, whole: Array, size: int) -> float:
    """Bytes that each of `size` devices sends by the ring algorithm; `whole` is what is gathered, reduced or scattered."""
    rounds = {'all-reduce': 2, 'collective-permute': size / (size - 1), 'collective-broadcast': size / (size - 1)}.get(kind, 1)
    return rounds * (size - 1) / size * whole.bytes


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of a program that runs on a mesh of these axes, in the order of the text.

    What an XLA for CPUs cannot say is read as what it means: an all-reduce of which each device keeps its part is a
    reduce-scatter, and one in fp32 between conversions from and to a smaller dtype is in that dtype.
    """
    return [one for computation in program.computations.values() for one in _of_computation(program, computation, mesh)]


def _of_computation(program: Program, computation: Computation, mesh: Mapping[str, int]) -> Iterator[Collective]:
    for instruction in computation.instructions:
        found = _KIND.fullmatch(instruction.opcode)
        if not found:
            is_other = instruction.opcode.startswith(KINDS) and not _END.fullmatch(instruction.opcode)
            if is_other or (instruction.opcode == 'send' and 'is_host_transfer=true' not in instruction.attributes):
                raise HloError(f'a collective that is not understood: {instruction.line}')
            continue
        if computation is not program.entry and computation.name not in program.callers:
            raise HloError(f'a collective in {computation.name}, which nothing calls: {instruction.line}')
        if program.times[computation.name]:
            yield from _pieces(program, computation, instruction, found[1], mesh)


def _pieces(
    program: Program, computation: Computation, instruction: Instruction, kind: str, mesh: Mapping[str, int]
) -> Iterator[Collective]:
    groups = device_groups(instruction, prod(mesh.values()))
    axes = axes_of(groups, mesh)
    if not axes:
        return
    synchronous, flops = overlap(program, computation, instruction)
    for index, operand, result, name in _operands(program, computation, instruction):
        actual_kind, operand, result = as_meant(program, computation, instruction, kind, index, operand, result, len(groups[0]))
        if kind == 'all-gather':  # belongs to what reads it; XLA may have moved a cast before it, and its path with it
            name = destination(program, computation, instruction, index) or name
        yield Collective(
            kind=actual_kind,
            axes=axes,
            groups=groups,
            operand=operand,
            result=result,
            times=program.times[computation.name],
            in_unbounded_loop=computation.name in program.unbounded,
            op_name=name or instruction.op_name,
            source=program.source(instruction),
            computation=computation.name,
            instruction=instruction.name,
            synchronous=synchronous,
            overlapped_flops=flops,
        )


def _operands(program: Program, computation: Computation, instruction: Instruction) -> Iterator[tuple[int, Array, Array, str]]:
    """Which operand, its array, the result and op_name of each array; of a buffer that joins several, those of its parts."""
    inputs = [computation.by_name[name] for name in instruction.operands]
    results = instruction.results
    if len(results) >= 2 * len(inputs) and instruction.opcode.endswith('-start'):
        results = results[len(inputs) :]  # (operands, results, contexts)
    if not inputs or len(results) < len(inputs):
        raise HloError(f'a collective whose operands are not understood: {instruction.line}')
    if instruction.opcode.startswith('all-to-all') and len(inputs) > 1:  # one array, cut in what each device gets
        operand, result = (part._replace(shape=(len(inputs), *part.shape)) for part in (inputs[0].results[0], results[0]))
        yield 0, operand, result, paths(instruction.op_name, 1)[0] or origin(program, computation, inputs[0])
        return
    own_names = paths(instruction.op_name, len(inputs))
    for index, (own, made, result) in enumerate(zip(own_names, inputs, results, strict=False)):
        parts = joined(program, computation, made)
        if len(parts) > 1 and instruction.opcode.startswith('all-reduce'):
            yield from ((index, part.results[0], part.results[0], origin(program, computation, part)) for part in parts)
        else:
            yield index, made.results[0], result, own or origin(program, computation, made)
