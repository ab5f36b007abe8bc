"""The result of executing a GPU program: the error of each output."""

from typing import Literal

from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.base.render.console import as_html, as_text, open_table
from megajax.base.result import Result

NOT_COVERED = 'not covered: kernels, buffer assignment, streams, autotuner choices, TF32'
_OWN_PROGRAM = (
    'jax.shard_map regions cannot run on one device, so the communication that the function itself '
    'requests is not checked: pass reference= for an independent check.'
)
MAX_ROWS = 20
NOT_FOUND = 'not found: '  # begins a culprit that says why there is none


def culprit_line(culprit: str, kind: str = '') -> str:
    """Return a line on the pass after which a program is wrong, or on why none was found."""
    if culprit.startswith(NOT_FOUND):
        return f'first wrong compiler pass {culprit}'
    return f'first wrong after {kind}{culprit}'


class Leaf(Result):
    """One output of the function."""

    name: str = Field(description='path among the outputs, as jax.tree_util.keystr writes it')
    error: float = Field(description='error as defined by megajax.xla.emulate.compare.Difference')
    limit: float
    ok: bool


class GpuRun(Result):
    """The outputs of a GPU program, compared with the expected outputs."""

    schema_version: Literal[1] = 1
    target: str
    jax_version: str
    mesh: dict[str, int] = Field(
        description='devices of each axis; empty for a program of one device'
    )
    compared_with: str = Field(description="source of the expected outputs, such as 'one device'")
    exact: bool = Field(description='whether 16-bit types were computed in fp32')
    limit: float = Field(description='limit of the error of floating-point outputs')
    leaves: list[Leaf] = Field(description='outputs, worst first')
    culprit: str | None = Field(description='pass that made the program wrong, if bisected')
    known_miscompiles: list[str] = Field(description='lines of `megajax.inspect.known_miscompiles`')
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every output is within its limit."""
        return all(leaf.ok for leaf in self.leaves)

    def raise_if_wrong(self) -> None:
        """Raise AssertionError with the table unless every output is within its limit."""
        if not self.ok:
            raise AssertionError(f'the program for {self.target} gives wrong results\n{self}')

    def __repr__(self) -> str:
        return f'<GpuRun: {"ok" if self.ok else "wrong results"}, target {self.target}>'

    def _repr_html_(self) -> str:
        return as_html(_tables(self))

    def __str__(self) -> str:
        return as_text(_tables(self), width=100)


def _tables(run: GpuRun) -> RenderableType:
    sizes = [f'{name}={size}' for name, size in run.mesh.items() if size > 1]
    axes = ' x '.join(sizes) or 'one device'
    precision = ', 16-bit types computed in fp32' if run.exact else ''
    head = f'{axes}, target {run.target}, jax {run.jax_version}, {run.seconds:.0f} s{precision}'
    compared = f'compared with {run.compared_with}'
    parts: list[RenderableType] = [Text(head), Text(compared), Text(), _table(run.leaves)]
    if len(run.leaves) > MAX_ROWS:
        parts.append(Text(f'... {len(run.leaves) - MAX_ROWS} more with smaller errors'))
    parts += [Text(), _conclusion(run)]
    if run.culprit:
        parts.append(Text(culprit_line(run.culprit), style='bold red'))
    parts += [Text(f'known miscompile: {line}') for line in run.known_miscompiles]
    if run.compared_with.startswith("the CPU's own"):
        parts.append(Text(_OWN_PROGRAM))
    return Group(*parts, Text(NOT_COVERED))


def _table(leaves: list[Leaf]) -> Table:
    table = open_table()
    for name in ('output', 'error', 'limit', ''):
        table.add_column(name, justify='right' if name in ('error', 'limit') else 'left')
    for leaf in leaves[:MAX_ROWS]:
        verdict = Text('ok', style='green') if leaf.ok else Text('WRONG', style='bold red')
        table.add_row(Text(leaf.name), f'{leaf.error:.1e}', f'{leaf.limit:.0e}', verdict)
    return table


def _conclusion(run: GpuRun) -> Text:
    if run.ok:
        return Text(f'ok: {len(run.leaves)} outputs agree', style='green')
    wrong = sum(not leaf.ok for leaf in run.leaves)
    return Text(f'WRONG: {wrong} of {len(run.leaves)} outputs', style='bold red')
