"""Print the tables of `megajax profile`."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.inspect.kernel_table import own_line
from megajax.analysis.profile.result import MeasuredLine, Part, Profile
from megajax.analysis.profile.work import GRAPH
from megajax.base.render.console import open_table
from megajax.base.render.folded import Folded
from megajax.base.render.units import rounded, si

# For the name of an instruction, or of a site that has a path instead of a name.
MAX_NAME_COLUMNS = 36
LABELS = {'products': 'matmul', 'exposed': 'exposed transfers'}


def tables(profile: Profile, *, top: int, with_instructions: bool = False) -> RenderableType:
    """Return the complete report, for a rich console, with at most `top` lines per table."""
    shown = [
        ('time of a step, divided by what runs (the parts add up to the step)', _parts(profile)),
        ('matmuls, [m, k] [k, n]', _products(profile, top)),
    ]
    if profile.collectives:
        shown.append(('collectives', _collectives(profile, top)))
    if profile.predictions:
        title = f'time of a step, measured and predicted for {profile.hardware}'
        shown.append((title, _predictions(profile)))
    if with_instructions:
        title = f'{min(top, len(profile.instructions))} longest instructions'
        shown.append((title, _instructions(profile, top)))
    if len(profile.processes) > 1:
        title = 'processes (own ms: time outside exposed transfers)'
        shown.append((title, _processes(profile)))
    sections = [part for title, table in shown for part in (Text(), Text(title), Folded(table))]
    return Group(Text(_head(profile)), *sections, Text(), *map(Text, _notes(profile)))


def _head(profile: Profile) -> str:
    axes = ' x '.join(f'{name}={size}' for name, size in profile.mesh.items())
    first, last = profile.steps[0], profile.steps[-1]
    steps = f'step {first}' if first == last else f'steps {first} to {last}'
    return (
        f'{profile.run}, {steps}, {axes}, {profile.device}: '
        f'{_ms(profile.median.step)} ms per step on the median device'
    )


def _parts(profile: Profile) -> Table:
    table = _table(('', 'part'), ('launches', 'median ms', 'share', 'slowest ms'))
    for kind in dict.fromkeys(part.kind for part in profile.parts):
        inside = [part for part in profile.parts if part.kind == kind]
        table.add_row(LABELS.get(kind, kind), '', *_sum(profile, inside), style='bold')
        for part in inside:
            table.add_row('', LABELS.get(part.name, part.name), *_sum(profile, [part]))
    table.add_row('total', '', *_sum(profile, profile.parts), style='bold')
    return table


def _sum(profile: Profile, parts: Sequence[Part]) -> tuple[str, ...]:
    launches = sum(part.launches for part in parts)
    median = sum(part.median for part in parts)
    return (
        f'{launches:,.0f}' if launches else '',
        _ms(median),
        f'{median / profile.median.step:.1%}',
        _ms(sum(part.slowest for part in parts)),
    )


def _products(profile: Profile, top: int) -> Table:
    table = _table(
        ('sizes', 'dtype', 'site', 'phase'),
        ('runs', 'ms', 'slowest ms', 'TFLOP/s', 'of peak', *_roofline(profile)),
    )
    for line in profile.products[:top]:
        table.add_row(
            line.what,
            line.dtype,
            line.site or '-',
            line.phase or '-',
            f'{line.launches:,.0f}',
            _ms(line.seconds),
            _ms(line.slowest_seconds),
            '-' if line.flops_per_second is None else rounded(line.flops_per_second / 1e12),
            '-' if line.peak_share is None else f'{line.peak_share:.1%}',
            *_predicted(profile, line),
        )
    return _more(table, profile.products, top)


def _collectives(profile: Profile, top: int) -> Table:
    numbers = 'runs', 'sent', 'ms', 'exposed ms', 'hidden ms', 'fastest ms', 'GB/s', 'slowest GB/s'
    table = _table(('axis', 'kind', 'site', 'phase'), (*numbers, *_roofline(profile)))
    for line in profile.collectives[:top]:
        rates = line.bytes_per_second, line.slowest_bytes_per_second
        table.add_row(
            line.axis or '-',
            line.kind,
            line.site or '-',
            line.phase or '-',
            f'{line.launches:,.0f}',
            si(line.wire_bytes),
            _ms(line.seconds),
            _ms(line.exposed_seconds),
            _ms(line.hidden_seconds),
            _ms(line.transfer_seconds),
            *('-' if rate is None else rounded(rate / 1e9) for rate in rates),
            *_predicted(profile, line),
        )
    return _more(table, profile.collectives, top)


def _predictions(profile: Profile) -> Table:
    table = _table(('part',), ('measured ms', 'roofline ms', 'plan ms'))
    for line in profile.predictions:
        seconds = line.measured, line.roofline, line.plan
        table.add_row(LABELS.get(line.part, line.part), *map(_ms, seconds))
    return table


def _instructions(profile: Profile, top: int) -> Table:
    table = _table(
        ('instruction', 'kind', 'line'),
        ('runs', 'ms', 'slowest ms', *_roofline(profile)),
    )
    for line in profile.instructions[:top]:
        table.add_row(
            line.name,
            line.kind,
            own_line(line.source),
            f'{line.launches:,.0f}',
            _ms(line.seconds),
            _ms(line.slowest_seconds),
            *_predicted(profile, line),
        )
    return table


def _processes(profile: Profile) -> Table:
    table = _table(('process', 'host'), ('step ms', 'own ms', 'ms behind median'))
    for line in profile.processes:
        is_slowest = line.process == profile.slowest_process
        table.add_row(
            str(line.process),
            line.host,
            _ms(line.step),
            _ms(line.own),
            f'{_ms(line.behind)}{" slowest" if is_slowest else ""}',
        )
    return table


def _notes(profile: Profile) -> Iterator[str]:
    yield from profile.notes
    if profile.collectives:
        yield (
            'fastest ms: per run, the shortest duration on any device of a group (the one that '
            'arrived last and waited for no other); GB/s: bytes sent, divided by it; both of the '
            "median device's group; slowest GB/s: of the group whose transfers take longest"
        )
    if len(profile.devices) > 1:
        median, slowest = profile.median, profile.slowest
        yield (
            f'median device: {median.device} of process {median.process}, '
            f'{_ms(median.own)} ms outside exposed transfers; '
            f'slowest: {slowest.device} of process {slowest.process}, {_ms(slowest.own)} ms'
        )
    if graphs := sum(part.median for part in profile.parts if part.name == GRAPH):
        yield (
            f'{_ms(graphs)} ms are in CUDA graphs, whose kernels the trace does not name; to see '
            'them, trace with XLA_FLAGS=--xla_gpu_enable_command_buffer='
        )
    if profile.not_predicted is not None:
        yield f'plan has no prediction: {profile.not_predicted}'
    if profile.hardware is None:
        device = 'this CPU' if profile.device == 'cpu' else profile.device
        yield (
            f'the peak of {device} is not known; to compare with a roofline, run megajax plan '
            'calibrate FILE.yaml and pass --gpu FILE.yaml'
        )


def _roofline(profile: Profile) -> tuple[str, ...]:
    return ('roofline ms',) if profile.hardware else ()


def _predicted(profile: Profile, line: MeasuredLine) -> tuple[str, ...]:
    seconds = line.predicted_seconds
    return ('-' if seconds is None else _ms(seconds),) if profile.hardware else ()


def _more(table: Table, lines: Sequence[MeasuredLine], top: int) -> Table:
    """Add a last line to the table that counts the lines not shown."""
    if rest := lines[top:]:
        table.add_row(f'{len(rest)} more', style='dim')
    return table


def _table(names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = open_table()
    for name in names:
        table.add_column(name, no_wrap=True, max_width=MAX_NAME_COLUMNS)
    for name in numbers:
        table.add_column(name, justify='right', no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f'{1e3 * seconds:,.2f}'
