"""Render an inspection as tables, for a terminal and as HTML."""

from collections import defaultdict
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.inspect.kernel_table import kernel_tables
from megajax.analysis.inspect.memory_table import memory_tables
from megajax.analysis.inspect.result import Inspection, Overlap, Rates, Row, Transfer
from megajax.analysis.inspect.run_report import run_lines
from megajax.base.render.console import as_html, as_text, number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.render.units import si

_STYLES = {
    'equal': 'green',
    'less': 'green',
    'expected': 'green',
    'MORE': 'bold red',
    'error': 'bold red',
    'note': 'dim',
}
_SHORT = {
    'all-reduce': 'AR',
    'all-gather': 'AG',
    'reduce-scatter': 'RS',
    'all-to-all': 'A2A',
    'collective-permute': 'permute',
}


def to_text(
    inspection: Inspection, *, width: int = 150, kernels: bool = False, memory: bool = False
) -> str:
    """Render an inspection as plain text."""
    return as_text(tables(inspection, kernels=kernels, memory=memory), width=width)


def to_html(inspection: Inspection) -> str:
    """Render an inspection as an HTML fragment for a notebook."""
    return as_html(tables(inspection))


def tables(
    inspection: Inspection, *, kernels: bool = False, memory: bool = False
) -> RenderableType:
    """Return the complete report for a rich console, optionally with kernels and memory."""
    axes = ' x '.join(f'{name}={size}' for name, size in inspection.mesh.items())
    layers = 'layers compiled separately' if inspection.unrolled else 'layers in a loop'
    layers += ' (--scan; a run compiles them separately)' if inspection.scan else ''
    parts: list[RenderableType] = [
        Text(
            f'{axes}, target {inspection.target}, jax {inspection.jax_version}, '
            f'overlap {inspection.overlap}, {layers}, '
            f'compiled in {inspection.compile_seconds:.0f} s'
        ),
        Text(),
        Folded(
            collectives_table(inspection.rows, inspection.reference),
            {4: 'XLA bytes', 6: 'Megatron bytes'},
        ),
        _totals(inspection),
        *_expected(inspection),
        _products(inspection),
        *_on_tpu(inspection),
    ]
    if inspection.schedule:
        parts += [Text(), Folded(schedule_table(inspection)), _shares(inspection)]
    parts += _seconds(inspection)
    if kernels:
        parts += [Text(), kernel_tables(inspection)]
    if memory:
        parts += [Text(), memory_tables(inspection.memory)]
    parts += [Text(), _memory(inspection), Text()]
    parts += [*run_lines(inspection.runs), *_findings(inspection), _conclusion(inspection)]
    return Group(*parts)


def collectives_table(rows: list[Row], reference: str = 'Megatron') -> Table:
    """Return a table with a row per site, phase and axis; a cell has a line per kind of array."""
    table = open_table(
        'site',
        *text_columns('phase', 'axis', 'XLA placed'),
        *number_columns('bytes'),
        *text_columns(f'{reference} {"place" if "and" in reference else "places"}'),
        *number_columns('bytes', 'ratio'),
        *text_columns('verdict'),
        title='collectives per step and device',
    )
    for row in rows:
        ratio = (
            f'{row.wire_bytes / row.megatron_wire_bytes:.3f}' if row.megatron_wire_bytes else '-'
        )
        theirs = si(row.megatron_wire_bytes) if row.megatron else '-'
        cells = (
            row.site,
            row.phase,
            row.axis or '-',
            transfers_cell(row.placed),
            si(row.wire_bytes),
            transfers_cell(row.megatron),
            theirs,
            ratio,
        )
        table.add_row(*cells, Text(row.verdict, style=_STYLES[row.verdict]))
    return table


def schedule_table(inspection: Inspection) -> Table:
    """Return a table with a row per group of similar collectives, most bytes first."""
    table = open_table(
        *text_columns('site', 'phase', 'axis', 'collective'),
        *number_columns('bytes', 'ms', 'ms hidden'),
        *text_columns('overlaps with', 'link'),
        'source',
        title='schedule',
    )
    similar = defaultdict[tuple[str, ...], list[Overlap]](list)
    for overlap in sorted(inspection.schedule, key=lambda overlap: -overlap.transfer.wire_bytes):
        key = (
            overlap.site,
            overlap.phase,
            overlap.axis,
            overlap.transfer.kind,
            _matched(overlap),
            _link(overlap),
        )
        similar[key].append(overlap)
    for (site, phase, axis, _, matched, link), group in similar.items():
        collective = transfers_cell([group[0].transfer]) + (
            f' and {len(group) - 1} more' if len(group) > 1 else ''
        )
        size = si(sum(overlap.transfer.wire_bytes for overlap in group))
        on_wire = _ms(sum(overlap.seconds for overlap in group))
        hidden = _ms(sum(overlap.hidden_seconds for overlap in group))
        source = '/'.join(group[0].source.split(' < ')[0].split('/')[-2:])
        table.add_row(site, phase, axis, collective, size, on_wire, hidden, matched, link, source)
    return table


def _matched(overlap: Overlap) -> str:
    if overlap.overlapped_gflops:
        return f'{overlap.overlapped_gflops:,.1f} GFLOP'
    return 'none (synchronous)' if overlap.synchronous else 'no matmul'


def _link(overlap: Overlap) -> str:
    return 'between hosts' if overlap.crosses_hosts else 'within a host'


def transfers_cell(transfers: list[Transfer], limit: int = 3) -> str:
    """Return a line for each kind of array that is sent, at most `limit` lines."""
    lines = [
        f'{"at most " * transfer.at_most}{transfer.times} '
        f'{_SHORT.get(transfer.kind, transfer.kind)} {transfer.array}'
        for transfer in transfers[:limit]
    ]
    if len(transfers) > limit:
        lines.append(f'... {len(transfers) - limit} more arrays')
    return '\n'.join(lines) or '-'


def _totals(inspection: Inspection) -> Text:
    parts = [
        f'{axis}: {ratio:.3f}x' for axis, ratio in inspection.ratios.items() if ratio is not None
    ]
    if not parts:
        return Text('one device: no communication')
    return Text(f'bytes sent, relative to {inspection.reference}  {", ".join(parts)}')


def _expected(inspection: Inspection) -> Iterator[Text]:
    """Yield lines on a pipeline's ticks, and on rows that send more than Megatron as documented."""
    pipeline = inspection.pipeline
    if pipeline is not None:
        yield Text(
            f'pipeline  each stage is busy in {pipeline.ticks - pipeline.idle_ticks} of '
            f'{pipeline.ticks} ticks per direction; bubble {pipeline.bubble:.1%}'
        )
    for row in (row for row in inspection.rows if row.verdict == 'expected'):
        more = si(row.wire_bytes - row.megatron_wire_bytes)
        reasons = '; '.join(row.expected_sources)
        yield Text(f'expected  {row.site} {row.phase} over {row.axis}: {more} more, {reasons}')


def _shares(inspection: Inspection) -> Text:
    parts = [f'{axis}: {share:.0%}' for axis, share in inspection.overlapped_share.items()]
    return Text(f'share of bytes that overlap matmuls  {", ".join(parts)}')


def _seconds(inspection: Inspection) -> list[Text]:
    """Return communication time and its overlap per axis, the step time, and the rates used."""
    rates = inspection.rates
    if rates is None:
        return []
    hidden = inspection.hidden_seconds
    parts = [
        _hidden(axis, seconds, hidden[axis]) for axis, seconds in inspection.wire_seconds.items()
    ]
    total = sum(overlap.seconds for overlap in inspection.schedule)
    parts.append(
        _hidden('total', total, sum(overlap.hidden_seconds for overlap in inspection.schedule))
    )
    compute, exposed = inspection.compute_seconds, inspection.exposed_seconds
    assert compute is not None
    assert exposed is not None
    return [
        Text(f'communication ms (overlapping matmuls)  {"; ".join(parts)}'),
        Text(
            f'step ms  {_ms(compute)} kernels + {_ms(exposed)} exposed communication = '
            f'{_ms(compute + exposed)}, estimated from the schedule; not measured'
        ),
        Text(
            f'rates  {rates.products / 1e12:.4g} TFLOP/s {rates.dtype} matmul, '
            f'{rates.attention / 1e12:.4g} attention; {rates.memory / 1e12:.4g} TB/s memory; '
            f'{_links(rates)}no latency',
            style='dim',
        ),
    ]


def _links(rates: Rates) -> str:
    links = (rates.inside_host, 'within a host'), (rates.between_hosts, 'per GPU between hosts')
    known = ', '.join(f'{rate / 1e9:.4g} {where}' for rate, where in links if rate)
    return f'{known.replace(" ", " GB/s ", 1)}; ' if known else ''


def _hidden(name: str, seconds: float, hidden: float) -> str:
    share = f', {hidden / seconds:.0%}' if seconds else ''
    return f'{name}: {_ms(seconds)} ({_ms(hidden)}{share})'


def _ms(seconds: float) -> str:
    return f'{1e3 * seconds:,.2f}'


def _products(inspection: Inspection) -> Text:
    products = inspection.products
    line = f'matmul work  {products.compiled / 1e12:,.3f} TFLOP per step and device'
    return Text(f'{line}, {products.ratio:.3f}x what the config requires')


def _on_tpu(inspection: Inspection) -> Iterator[Text]:
    """Yield XLA's estimate of a TPU's cycles, and what a program for TPUs lacks."""
    if inspection.estimated_cycles is None:
        return
    yield Text(
        f'cycles  {inspection.estimated_cycles:,} per step, estimated by XLA; without collectives'
    )
    yield Text(
        'compiled only: megajax has never run a program on a TPU. Attention and experts use XLA, '
        'not kernels; no times are estimated',
        style='dim',
    )


def _memory(inspection: Inspection) -> Text:
    memory = inspection.memory
    line = (
        f'memory per device  {si(memory.arguments)} state and batch + '
        f'{si(memory.temporaries)} temporaries + {si(memory.outputs)} outputs = {si(memory.needed)}'
    )
    if memory.device:
        line += f', {memory.needed / memory.device:.0%} of {si(memory.device)}'
    replicated = ', '.join(f'{name} {si(size)}' for name, size in memory.largest_replicated)
    line += f'\n{memory.remedy}' if memory.remedy else ''
    return Text(line + (f'\nlargest replicated parameters  {replicated}' if replicated else ''))


def _findings(inspection: Inspection) -> list[Text]:
    return [
        Text(f'{finding.level}: {finding.rule}: {finding.message}', style=_STYLES[finding.level])
        for finding in inspection.findings
    ]


def _conclusion(inspection: Inspection) -> Text:
    if inspection.ok:
        executed = ", and the program's results are correct" if inspection.runs else ''
        line = f"ok: no collective sends more than {inspection.reference}'s{executed}"
        return Text(line, style='green')
    more = [
        f'{row.site} {row.phase} over {row.axis}'
        for row in inspection.rows
        if row.verdict == 'MORE'
    ]
    errors = sum(finding.level == 'error' for finding in inspection.findings)
    reasons = ([f'MORE than {inspection.reference}: {"; ".join(more)}'] if more else []) + (
        [f'{errors} lint error{"s" * (errors > 1)}'] if errors else []
    )
    reasons += (
        ["the program's results differ from one device's"]
        if not all(run.ok for run in inspection.runs)
        else []
    )
    return Text(', '.join(reasons), style='bold red')
