"""What a run says on the terminal: where things lie, how far it is, what came out."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megajax.parallel.mesh import is_simulated
from megajax.train.placements import Placement


class Report:
    """The terminal of a run; processes other than the first stay silent."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True, quiet=jax.process_index() != 0)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, markup=False)

    def mesh(self, mesh: Mesh) -> None:
        """The axes, and on what devices they lie."""
        device = mesh.devices.flat[0]
        axes = ' x '.join(f'{name}={size}' for name, size in mesh.shape.items())
        if is_simulated(mesh):
            where = f'{mesh.size} devices, simulated: this machine has only a CPU'
        else:
            where = f'{mesh.size} x {device.device_kind}' if device.platform != 'cpu' else _cpus(mesh)
        self.say(f'mesh       {axes}, {where}')

    def placements(self, parameters: list[Placement], num_parameters: int) -> None:
        """The table of who holds what."""
        table = Table('parameter', 'shape', 'placement', 'bytes per device', box=None, header_style='bold', pad_edge=False)
        for column in table.columns:
            column.no_wrap = True
        table.columns[-1].justify = 'right'
        for one in parameters:
            placement = ','.join(axis or '-' for axis in one.axes)
            table.add_row(one.name, 'x'.join(map(str, one.shape)), placement, f'{one.bytes_per_device:,}')
        total = sum(one.bytes_per_device for one in parameters)
        table.add_row(f'{num_parameters:,} parameters', '', '', f'{total:,}', style='bold')
        self.console.print(table)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say what takes a while."""
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self.say(f'{what} ...')
            yield

    @contextmanager
    def progress(self, *, start: int, steps: int, log_every: int) -> Iterator['StepReport']:
        """A bar over the steps; where the output is no terminal, a line every `log_every` steps."""
        columns = (
            TextColumn('step'), MofNCompleteColumn(), BarColumn(bar_width=24), _Values(), TextColumn('left'), TimeRemainingColumn()
        )  # fmt: skip
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            yield StepReport(self, bar, start=start, steps=steps, log_every=log_every)


def _cpus(mesh: Mesh) -> str:
    return 'one CPU' if mesh.size == 1 else f'{mesh.size} CPU devices of {jax.process_count()} processes'


class StepReport:
    """The progress of the training loop."""

    def __init__(self, report: Report, bar: Progress, *, start: int, steps: int, log_every: int):
        self.report, self.bar, self.steps, self.log_every = report, bar, steps, log_every
        self.task = bar.add_task('train', total=steps, completed=start, values='')

    def step(self, step: int, *, loss: float, tokens_per_second: float, skipped: bool) -> None:
        """After each step."""
        values = f'loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s'
        if skipped:
            self.report.say(f'step {step} is skipped: its loss is {loss:.4g}')
        self.bar.update(self.task, completed=step, values=values)
        if self.bar.disable and (step % self.log_every == 0 or step == self.steps):
            self.report.say(f'step {step}/{self.steps}  {values}')


class _Values(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields['values'])
