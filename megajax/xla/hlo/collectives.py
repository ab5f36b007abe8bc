"""List the collectives of a compiled program.

Each record has the array, the number of executions, the mesh axes and the overlapping matmuls.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from math import prod

from megajax.xla.hlo.cpu_collectives import as_meant
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.groups import Groups, axes_of, device_groups
from megajax.xla.hlo.op_paths import destination, joined, origin, paths
from megajax.xla.hlo.program import Array, Computation, Instruction, Program
from megajax.xla.hlo.schedule import overlap
from megajax.xla.hlo.transfers import Sent, arrays_of, kind_of, ring_bytes, whole_of, widest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One array that crosses the wire.

    XLA may have joined several arrays in one instruction; they then have the same `instruction`.
    `operand` and `result` are one device's arrays before and after. `times` is the number of runs;
    with `at_most` it is an upper bound, because the branch might not run or because data decides
    how much of the array is sent. `axes` is empty if no device sends to another. `op_name` is the
    path of the array, or of the instruction that made it. `overlapped_flops` counts the FLOPs of
    the matmuls on one device that run between start and end; if `synchronous` is true, no matmul
    can.
    """

    kind: str
    axes: tuple[str, ...]
    groups: Groups
    operand: Array
    result: Array
    times: int
    at_most: bool
    op_name: str
    source: str
    computation: str
    instruction: str
    synchronous: bool
    overlapped_flops: int

    @property
    def axis(self) -> str:
        """The axes joined by `+`: `data`, `model`, `data+model`."""
        return '+'.join(self.axes)

    @property
    def place(self) -> str:
        """Where the collective comes from: its path and its source line."""
        return f'{self.op_name} ({self.source})'

    @property
    def wire_bytes(self) -> float:
        """The bytes that a device sends in each run, with the ring algorithm."""
        return ring_bytes(self.kind, self.whole, widest(self.groups))

    @property
    def whole(self) -> Array:
        """The gathered, reduced or scattered array, before it is split or after it is joined."""
        return whole_of(self.kind, self.operand, self.result)

    @property
    def is_scalar(self) -> bool:
        """Whether a device's array is a single number."""
        return not self.operand.dims

    @property
    def is_scalar_in_whole(self) -> bool:
        """Whether the array is a single number even before it is split or after it is joined.

        An array of which each device has one element is none.
        """
        if self.kind == 'collective-permute':
            return not self.operand.shape
        return not self.whole.dims


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Return every collective in the text of a program, for a mesh of these axes and sizes.

    Collectives that never run are included, with `times` 0. Collectives that XLA's CPU backend
    cannot express are interpreted: an all-reduce of which each device keeps only its part counts as
    a reduce-scatter, as in a fusion for TPUs, and an fp32 all-reduce between conversions from and
    to a smaller dtype counts in that dtype.
    """
    return [
        collective
        for computation in program.computations.values()
        for instruction in computation.instructions
        if (kind := kind_of(instruction))
        for collective in _pieces(program, computation, instruction, kind, mesh)
    ]


def _pieces(
    program: Program,
    computation: Computation,
    instruction: Instruction,
    kind: str,
    mesh: Mapping[str, int],
) -> Iterator[Collective]:
    if computation is not program.entry and computation.name not in program.callers:
        raise HloError(
            f'a collective in {computation.name}, which nothing calls: {instruction.line}'
        )
    groups = device_groups(instruction, prod(mesh.values()))
    synchronous, flops = overlap(program, computation, instruction)
    # XLA for TPUs fuses an all-reduce with the slice of which it makes a reduce-scatter.
    _, named = program.fusion_of(computation) or (computation, instruction)
    for sent, name in _named(program, computation, instruction, kind):
        actual_kind, operand, result = as_meant(
            program, computation, instruction, kind, sent, groups
        )
        yield Collective(
            kind=actual_kind,
            axes=axes_of(groups, mesh),
            groups=groups,
            operand=operand,
            result=result,
            times=program.times[computation.name],
            at_most=computation.name in program.runs.at_most or kind == 'ragged-all-to-all',
            op_name=name or named.op_name,
            source=program.source(named),
            computation=computation.name,
            instruction=instruction.name,
            synchronous=synchronous,
            overlapped_flops=flops,
        )


def _named(
    program: Program, computation: Computation, instruction: Instruction, kind: str
) -> Iterator[tuple[Sent, str]]:
    """Yield each array with its op_name; for a buffer that joins several arrays, its parts."""
    arrays = arrays_of(computation, instruction)
    for sent, own in zip(arrays, paths(instruction.op_name, len(arrays)), strict=True):
        operand = computation.by_name[instruction.operands[sent.place]]
        parts = joined(program, computation, operand)
        if len(parts) > 1 and instruction.opcode.startswith('all-reduce'):
            # XLA may have merged the matmuls that made two parts, and given both one path.
            names = paths(instruction.op_name if len(arrays) == 1 else '', len(parts))
            for part, name in zip(parts, names, strict=True):
                yield (
                    Sent(sent.place, part.results[0], part.results[0]),
                    name or origin(program, computation, part),
                )
        else:
            # An all-gather belongs to its reader, because XLA may have moved a cast, with its path,
            # in front of the all-gather. A joined permute, which has no path, also belongs to its
            # reader: the first permute of a ring may send an array that an earlier pass produced.
            is_of_reader = kind == 'all-gather' or (kind == 'collective-permute' and not own)
            reader = destination(program, computation, instruction, sent.place)
            name = own or origin(program, computation, operand)
            yield sent, (reader if is_of_reader else '') or name
