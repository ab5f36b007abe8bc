"""The terminal output of a run: placements, progress and results."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from megajax.base.render.console import open_table, print_fitting
from megajax.base.render.folded import Folded
from megajax.base.render.text import folded, visible
from megajax.base.render.units import duration, rounded
from megajax.core.config import Config
from megajax.core.config.model import ModelConfig
from megajax.core.counts.parameters import num_parameters
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.counts.schedule import schedule_of
from megajax.core.counts.windows import windows_within
from megajax.core.hardware.targets import is_nvidia
from megajax.core.hardware.visible import lacks_gpus_of_slurm
from megajax.core.parallel.mesh import is_simulated
from megajax.core.parallel.placements import Placement
from megajax.core.train.loss_scale import MARGIN
from megajax.runtime.processes.signals import drop_lost_outputs

Forms = Mapping[str, Callable[[float], str]]
LEARNING: Forms = {
    'loss': 'loss {:.3f}'.format,
    'lr': 'lr {:.2e}'.format,
    'grad_norm': 'grad norm {:.2f}'.format,
}
ROUTING: Forms = {
    'expert_load': 'expert load {:.2f}x'.format,
    'dropped': 'dropped {:.1%}'.format,
    'router_entropy': 'router entropy {:.2f}'.format,
    'balance_loss': 'balance loss {:.3g}'.format,
}
# Rates that are averaged over several steps, weighted by the time of the steps.
RATES: Forms = {
    'tokens_per_s': '{:,.0f} tokens/s'.format,
    'tflops_per_device': lambda number: f'{rounded(number)} TFLOP/s',
    'mfu': 'MFU {:.1%}'.format,
}
# A delay is reported if it exceeds this share of the step time since the last line, and this many
# ms.
WORTH_SAYING, LEAST_MS = 0.1, 100.0
# Number of consecutive steps in which experts receive nothing, after which a line is printed.
IDLE_STEPS = 100
# If the first step takes at least this many seconds, its own overhead of a few tenths of a second
# does not matter.
LONG = 2.0


class Report:
    """The terminal output of a run; only the first process prints."""

    def __init__(self) -> None:
        is_quiet = jax.process_index() != 0
        self.console = _Console(
            highlight=False, emoji=False, markup=False, soft_wrap=True, quiet=is_quiet
        )

    def say(self, text: str) -> None:
        """Print a line; on a terminal that is too narrow, break it at its spaces."""
        text = visible(text)
        if self.console.is_terminal:
            text = folded(text, self.console.width)
        self.console.print(text)

    def mesh(self, mesh: Mesh) -> None:
        """Print the axes of the mesh and its devices."""
        device = mesh.devices.flat[0]
        axes = ' x '.join(f'{name}={size}' for name, size in mesh.shape.items())
        if is_simulated(mesh):
            where = f'{mesh.size} devices, simulated on the CPU'
        else:
            where = (
                f'{mesh.size} x {device.device_kind}' if device.platform != 'cpu' else _cpus(mesh)
            )
        self.say(f'mesh       {axes}, {where}')
        if device.platform == 'cpu' and lacks_gpus_of_slurm():
            self.say(
                'note       Slurm gave this task no GPU, so the run uses CPUs: ask for GPUs, for '
                'example srun --gpus-per-node=8, or set JAX_PLATFORMS=cpu if you want CPUs'
            )
        if device.platform != 'cpu' and not is_nvidia(device):
            self.say(
                f'note       megajax was never tried on {device.device_kind}: training has run on '
                "CPUs and was compiled for NVIDIA GPUs; attention uses XLA's kernels"
            )

    def parallelism(self, config: Config) -> None:
        """Print the overlap schedule and, if they are used, pipeline and context parallelism.

        The config has no `auto` left (`overlap_rules.resolved`).
        """
        mesh, train = config.mesh, config.train
        if config.overlap.is_split or config.overlap.unroll:
            is_unrolled = train.unroll is True
            how = 'each layer compiled on its own' if is_unrolled else 'layers in a loop'
            self.say(f'overlap    {train.overlap}, {how}')
        if mesh.stages > 1:
            schedule = schedule_of(config)
            chunks = f'{mesh.virtual_stages} x ' if mesh.virtual_stages > 1 else ''
            self.say(
                f'pipeline   {mesh.stages} stages of {chunks}{layers_of_chunk(config)} layers, '
                f'{train.schedule}, {train.microbatches} microbatches: '
                f'bubble {schedule.bubble:.1%} of the busy time'
            )
        if mesh.context > 1:
            shard, windows = train.seq_len // mesh.context, windows_within(config)
            ways = {'gather': 'all at once', 'ring': 'shard by shard', 'all_to_all': 'by heads'}
            how, by_heads = ways[mesh.context_exchange], mesh.exchanges_heads
            sends = [f'{window:,}' for window in windows if window and not by_heads]
            each = [
                f'{how} (mesh.context_exchange={mesh.context_exchange})'
                if None in windows or by_heads
                else '',
                f'of {" or ".join(sends)} tokens with each neighbor (windows)' if sends else '',
            ]
            self.say(
                f'context    {mesh.context} shards of {shard:,} tokens, which exchange keys and '
                f'values {" and ".join(filter(None, each))}'
            )

    def experts(self, config: Config) -> None:
        """Print a note if the loss cannot train the routers."""
        experts = config.model.experts
        is_new = config.run.start_from is None and config.lora is None
        if experts is not None and experts.active == 1 and experts.normalize and is_new:
            self.say(
                'note       model.experts.active=1 with normalize=true: the weight of the one '
                'expert is constant, so the loss does not train the routers; to train them, begin '
                'a run from random weights with model.experts.normalize=false'
            )

    def loss_scale(self, first: float, held: float) -> None:
        """Print fp16's first loss scale, and the scale at which the first gradients are finite."""
        before = f'overflow at {first:,.0f}, and ' if held < first else ''
        self.say(
            f'loss scale the gradients of the first batch {before}hold at {held:,.0f}: '
            f'the run begins with {held / MARGIN:,.0f}'
        )

    def placements(self, parameters: list[Placement], model: ModelConfig) -> None:
        """Print the table of the parameters' placements, and how many of them are trained."""
        table = open_table('parameter', 'shape', 'placement', 'bytes per device')
        for column in table.columns:
            column.no_wrap = True
        table.columns[-1].justify = 'right'
        for parameter in parameters:
            axes = ','.join('+'.join(axes) or '-' for axes in parameter.axes)
            shape = 'x'.join(map(str, parameter.shape))
            table.add_row(parameter.name, shape, axes, f'{parameter.bytes_per_device:,}')
        count, trained = (num_parameters(model, trained=only) for only in (False, True))
        total = sum(parameter.bytes_per_device for parameter in parameters)
        table.add_row(f'{count:,} parameters', '', '', f'{total:,}', style='bold')
        print_fitting(Folded(table), self.console)
        if trained < count:
            self.say(f'trained    {trained:,} of {count:,} parameters ({trained / count:.2%})')

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show what the run is doing while the block runs."""
        if self.console.is_terminal:
            with self.console.status(what):
                yield
        else:
            self.say(f'{what} ...')
            yield

    @contextmanager
    def progress(self, *, start: int, steps: int, log_every: int) -> Iterator['StepReport']:
        """Print a line every `log_every` steps; on a terminal, above a progress bar."""
        columns = (
            TextColumn('step'),
            MofNCompleteColumn(),
            BarColumn(bar_width=16),
            _Values(),
            TextColumn('left'),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as bar:
            report = StepReport(self, bar, start=start, steps=steps, log_every=log_every)
            try:
                yield report
            finally:
                report.close()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Continue if the reader of the output is gone; rich would exit.

        This happens, for example, with `megajax train | tee log` in a terminal that is then closed.
        """
        drop_lost_outputs()


def _cpus(mesh: Mesh) -> str:
    many = f'{mesh.size} CPU devices of {jax.process_count()} processes'
    return 'one CPU' if mesh.size == 1 else many


class StepReport:
    """The progress of the training loop: lines and, on a terminal, a bar below them."""

    def __init__(self, report: Report, bar: Progress, *, start: int, steps: int, log_every: int):
        self.report, self.bar, self.steps, self.log_every = report, bar, steps, log_every
        self.task = bar.add_task('train', total=steps, completed=start, values='')
        self._sums: Counter[str] = Counter()  # sums since the last line
        self._skipped: Counter[str] = Counter()
        # number of idle experts in each of the last steps, as long as there are any
        self._idle: list[float] = []
        self._count = 0
        self._is_timed = False  # whether the run's remaining time has been estimated

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Report a step; `values` are its numbers as in `metrics.jsonl`."""
        if not values['taken']:
            self.report.say(
                f'step {step} is skipped: {_why_skipped(values)}; '
                f'{values["skipped_steps"]:.0f} so far'
            )
            self._skipped[_kind_of_skip(values)] += 1
        self._count += 1
        self._sums.update(
            {name: values[name] for name in ('step_ms', 'data_wait_ms', 'checkpoint_ms')}
        )
        self._sums.update(
            {name: values[name] * values['step_ms'] for name in RATES if name in values}
        )
        rates = {name: self._sums[name] / self._sums['step_ms'] for name in RATES if name in values}
        lines = [_describe(form, values) for form in (LEARNING, ROUTING)]
        lines.append('  '.join([_describe(RATES, rates), *_memory(values)]))
        self.bar.update(self.task, completed=step, values=_in_short(values, rates))
        if step % self.log_every == 0 or step == self.steps:
            self._say(f'step {step}/{self.steps}  {lines[0]}', *filter(None, lines[1:]))
            for remark in _remarks(self._sums, values):
                self.report.say(f'step {step}  {remark}')
            self._sums.clear()
        self._note_idle_experts(step, values.get('idle_experts', 0))
        self._estimate(step, values['step_ms'] / 1e3)

    def _note_idle_experts(self, step: int, count: float) -> None:
        """Print, once, that experts have received nothing for long; reset when all get tokens."""
        self._idle = [*self._idle, count] if count else []
        if len(self._idle) == IDLE_STEPS:
            self.report.say(f'step {step}  {idle_experts(min(self._idle))}')

    def _estimate(self, step: int, seconds: float) -> None:
        """Print the time of the remaining steps, after the first step if that step was long."""
        left = self.steps - step
        if self._is_timed or not left or (self._count == 1 and seconds < LONG):
            return
        self._is_timed = True
        self.report.say(
            f'time       {duration(seconds)} a step: the {left:,} steps that are left take '
            f'about {duration(left * seconds)}'
        )

    def _say(self, *parts: str) -> None:
        """Print a line, above the bar if there is one, or several lines on a narrow terminal."""
        console, line = self.report.console, '  '.join(parts)
        if console.is_terminal and len(line) > console.width:
            line = '\n    '.join(parts)
        self.report.say(line)

    def close(self) -> None:
        """Print how many steps of this start were skipped, and why."""
        if self._skipped:
            reasons = ', '.join(f'{count} for {kind}' for kind, count in self._skipped.items())
            self.report.say(f'skipped    {self._skipped.total()} of {self._count} steps: {reasons}')


def idle_experts(count: float) -> str:
    """Return a remark that this many experts received nothing for IDLE_STEPS steps."""
    return (
        f'at least {count:.0f} experts received no token in each of {IDLE_STEPS} consecutive steps '
        '(all layers together); begin a run with a larger model.experts.balance_loss, or with '
        'model.experts.selection_bias=true'
    )


def _describe(forms: Forms, values: Mapping[str, float]) -> str:
    """Format the values that `forms` names, in the order of `forms`; skip missing values."""
    return '  '.join(form(values[name]) for name, form in forms.items() if name in values)


def _in_short(values: Mapping[str, float], rates: Mapping[str, float]) -> str:
    """Return the loss and one rate, which fit next to the bar."""
    rate = 'mfu' if 'mfu' in rates else 'tokens_per_s'
    shown = {'loss': LEARNING['loss'], rate: RATES[rate]}
    return _describe(shown, {**values, **rates})


def _why_skipped(values: Mapping[str, float]) -> str:
    if values['overflow']:
        return f'in fp16 its gradients overflow at a loss scale of {values["loss_scale"]:,.0f}'
    loss, norm = (rounded(values[name], 4) for name in ('loss', 'grad_norm'))
    return f'its loss is {loss} and its gradient norm {norm}'


def _kind_of_skip(values: Mapping[str, float]) -> str:
    if values['overflow']:
        return 'gradients that overflow in fp16'
    return 'a spike in the loss' if values['finite'] else 'a loss or gradient that is not finite'


def _memory(values: Mapping[str, float]) -> Iterator[str]:
    for name, what in (('memory_bytes', ''), ('planned_memory_bytes', ' planned')):
        if name in values:
            yield (
                f'{values[name] / 1e9:.1f} GB'
                if values[name] >= 1e9
                else f'{values[name] / 1e6:.1f} MB'
            ) + what


def _remarks(sums: Mapping[str, float], values: Mapping[str, float]) -> Iterator[str]:
    """Yield the delays since the last line that are long enough for a line of their own."""
    limit = max(WORTH_SAYING * sums['step_ms'], LEAST_MS)
    if sums['data_wait_ms'] > limit:
        yield f'waited for data {sums["data_wait_ms"] / 1e3:.2f} s of {sums["step_ms"] / 1e3:.2f} s'
    if sums['checkpoint_ms'] > limit:
        saving, steps = sums['checkpoint_ms'] / 1e3, sums['step_ms'] / 1e3
        yield f'saving blocked training for {saving:.2f} s; the steps took {steps:.2f} s'
    behind = values.get('slowest_process_behind_ms', 0)
    if behind > WORTH_SAYING * values['step_ms']:
        process = f'process {values["slowest_process"]:.0f}'
        yield f'{process} reaches each step {behind:.1f} ms later than the median'


class _Values(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields['values'], no_wrap=True)
