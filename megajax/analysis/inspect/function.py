"""List the collectives of any function: of a project without a config."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import jax
from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from megajax.analysis.inspect.check import check_mesh, check_trip_count, compiled_program, prepared
from megajax.analysis.inspect.report import transfers_cell
from megajax.analysis.inspect.result import Transfer
from megajax.base.render.console import as_html, as_text, open_table
from megajax.base.render.folded import Folded
from megajax.base.render.units import si
from megajax.base.result import Result
from megajax.xla.emulate.arguments import AnyMesh
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import products, uncounted_calls
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text
from megajax.xla.miscompiles import confirmed, detect_in
from megajax.xla.miscompiles.guard import compiled_target


class FunctionTransfer(Result):
    """Collectives of the same kind and array, over one mesh axis, from one line."""

    axis: str = Field(description='mesh axes joined by +')
    transfer: Transfer
    op_name: str
    source: str = Field(description='Python frames, innermost first')


class FunctionInspection(Result):
    """The collectives and matmuls of one compiled function, per run and device."""

    target: str = Field(description='cpu, tpu, or the GPU that the program was compiled for')
    mesh: dict[str, int]
    jax_version: str
    transfers: list[FunctionTransfer] = Field(description='the most bytes first')
    matmul_flops: float = Field(description='FLOPs, multiplied by the trip counts of loops')
    unknown_loops: list[str] = Field(
        default_factory=list,
        description='loops with matmuls, of unknown length, which count as one step',
    )
    uncounted_calls: list[str] = Field(
        default_factory=list,
        description='kernels and library calls whose matmuls and bytes are unknown and not counted',
    )
    known_miscompiles: list[str]

    def sent_over(self, axis: str) -> float:
        """Return the bytes that a device sends over a mesh axis, alone or with other axes."""
        return sum(
            each.transfer.wire_bytes for each in self.transfers if axis in each.axis.split('+')
        )

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of arrays by axis and kind, as `assert_collectives` takes them."""
        counts = defaultdict[str, Counter[str]](Counter)
        for each in self.transfers:
            counts[each.axis.replace('+', '_and_')][each.transfer.kind] += each.transfer.times
        return {axis: dict(kinds) for axis, kinds in counts.items()}

    def __repr__(self) -> str:
        return f'<FunctionInspection: {_head(self)}>'

    def __str__(self) -> str:
        return as_text(_tables(self), width=150)

    def _repr_html_(self) -> str:
        return as_html(_tables(self))


def inspect_function(
    function: Any,
    args: tuple[Any, ...],
    *,
    mesh: AnyMesh | None = None,
    target: str = 'cpu',
    trip_count: int | None = None,
) -> FunctionInspection:
    """Compile a function and list its collectives.

    `function` is any function, jitted or not, with `args` that are arrays or
    `jax.ShapeDtypeStruct`s with shardings; or, without `args`, a `jax.stages.Lowered` or
    `Compiled`. The mesh is `mesh`, or the mesh of the arguments, or the current mesh. `target` is
    a GPU to compile for (none is needed); with cpu, the program is compiled for the devices of the
    arguments. `trip_count` is the number of steps of loops whose length XLA does not know; without
    it, one that communicates is an error. If the data decides which branch runs, the branch that
    sends the most, or else has the most FLOPs, counts each time. Raises ValueError for a function
    or a target that cannot be compiled, without a mesh, and for a mesh of a different size.
    """
    check_trip_count(trip_count)
    if target == 'cpu':
        function, args, sizes = prepared(function, args, mesh)
        compiled = compiled_program(function, args, mesh)
        text, target = program_text(compiled), compiled_target(compiled)
    else:
        from megajax.xla.emulate.jitted import gpu_text  # only for a GPU

        text, sizes = gpu_text(function, args, target=target, mesh=mesh)
    program = Program(text, trip_count=trip_count)
    check_mesh(program, sizes)
    try:
        transfers = _transfers(program, sizes)
    except HloError as error:
        # The program may be wrong because of a flag that also makes it unreadable.
        if not (known := _known_miscompiles(program, target)):
            raise
        lines = [f'{error}', *(f'known miscompile  {line}' for line in known)]
        raise type(error)('\n'.join(lines)) from error
    return FunctionInspection(
        target=target,
        mesh=sizes,
        jax_version=jax.__version__,
        transfers=transfers,
        matmul_flops=sum(product.flops * times for product, _, _, times in products(program)),
        unknown_loops=program.runs.unknown_loops,
        uncounted_calls=[f'{times} x {call}' for call, times in uncounted_calls(program).items()],
        known_miscompiles=_known_miscompiles(program, target),
    )


def _known_miscompiles(program: Program, target: str) -> list[str]:
    return [str(finding) for finding in confirmed(detect_in(program), target)]


def _transfers(program: Program, mesh: Mapping[str, int]) -> list[FunctionTransfer]:
    """Return the collectives that run and send an array to another device; scalars do not count."""
    groups = defaultdict[tuple[Any, ...], list[int]](list)
    for each in collectives(program, mesh):
        if each.times and each.axes and not each.is_scalar_in_whole:
            key = each.axis, each.kind, each.whole, each.wire_bytes, each.at_most
            groups[(*key, each.op_name, each.source)].append(each.times)
    found = [
        FunctionTransfer(
            axis=axis,
            transfer=Transfer(
                kind=kind,
                array=str(array),
                times=sum(times),
                wire_bytes=sum(times) * size,
                at_most=at_most,
            ),
            op_name=op_name,
            source=source,
        )
        for (axis, kind, array, size, at_most, op_name, source), times in groups.items()
    ]
    return sorted(found, key=lambda each: -each.transfer.wire_bytes)


def _rows(found: FunctionInspection) -> list[tuple[tuple[str, str], Transfer]]:
    """Return the axis, line and transfer of each row: equal transfers of a line are one row."""
    rows: dict[tuple[str, ...], tuple[tuple[str, str], Transfer]] = {}
    for each in found.transfers:
        line = each.source.split(' < ')[0].rpartition('site-packages/')[2]
        place = each.axis, line or each.op_name
        key = *place, each.transfer.kind, each.transfer.array
        sums = {}
        if key in rows:
            before = rows[key][1]
            for name in ('times', 'wire_bytes'):
                sums[name] = getattr(before, name) + getattr(each.transfer, name)
            sums['at_most'] = before.at_most or each.transfer.at_most
        rows[key] = place, each.transfer.model_copy(update=sums)
    return sorted(rows.values(), key=lambda row: -row[1].wire_bytes)


def _axes(found: FunctionInspection) -> dict[str, int]:
    """Return the mesh axes of more than one device, or all if there are none."""
    return {axis: size for axis, size in found.mesh.items() if size > 1} or found.mesh


def _head(found: FunctionInspection) -> str:
    axes = ' x '.join(f'{name}={size}' for name, size in _axes(found).items())
    return f'{axes}, target {found.target}'


def _tables(found: FunctionInspection) -> RenderableType:
    table = open_table(title='collectives per run and device')
    for name in ('axis', 'collective', 'bytes', 'source'):
        table.add_column(name, justify='right' if name == 'bytes' else 'left')
    for (axis, source), transfer in _rows(found):
        table.add_row(axis, transfers_cell([transfer]), si(transfer.wire_bytes), source)
    sent = ', '.join(f'{axis}: {si(found.sent_over(axis))}' for axis in _axes(found))
    return Group(
        Text(f'{_head(found)}, jax {found.jax_version}'),
        Text(),
        Folded(table),
        Text(f'bytes sent  {sent}'),
        Text(f'matmul work  {found.matmul_flops / 1e9:,.3f} GFLOP'),
        *(
            Text(f'unknown loop  counts as one step, give a trip_count: {place}')
            for place in found.unknown_loops
        ),
        *(Text(f'not counted  {call}') for call in found.uncounted_calls),
        *(Text(f'known miscompile  {line}') for line in found.known_miscompiles),
    )
