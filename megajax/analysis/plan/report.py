"""Print a plan as tables, for a terminal or as HTML."""

from collections import defaultdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.plan.result import Candidate, Plan
from megajax.base.render.console import as_html, as_text, number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.render.units import count, duration, rounded, si

_SHOWN = 5e-4  # share of the step above which launch overhead gets its own line


def to_text(plan: Plan, *, width: int = 150) -> str:
    """Return a plan as plain text."""
    return as_text(tables(plan), width=width)


def to_html(plan: Plan) -> str:
    """Return a plan as an HTML fragment, for a notebook."""
    return as_html(tables(plan))


def tables(plan: Plan) -> RenderableType:
    """Return all tables and lines of a plan, for a rich console."""
    hosts = plan.gpus // plan.gpus_per_host
    origin = 'fastest layout' if plan.is_from_search else 'layout of the config'
    timed = '' if plan.program == 'megajax' else f', timed for {plan.program}'
    return Group(
        Text(f'{plan.gpus} x {plan.hardware}, {count(hosts, "host")} of {plan.gpus_per_host}'),
        Text(f'{origin}{timed}: {plan.layout.name}'),
        *_train_error(plan),
        Text(plan.efficiencies),
        *(
            [Text(f'times {_band(plan)}: {"; ".join(plan.band_reasons)}')]
            if plan.band_reasons
            else ()
        ),
        *([Text(_load(plan.imbalance))] if plan.imbalance else ()),
        Text(),
        Folded(memory_table(plan)),
        Text(),
        Folded(time_table(plan)),
        _rates(plan),
        Text(),
        *_run(plan),
        Text(),
        Folded(layouts_table(plan)),
        *_impossible(plan),
        *_what_if(plan),
        Text(),
        Text(f'{"tensor parallelism":<24}{plan.verdict}', style='bold'),
        *(
            Text(f'{name:<24}{verdict}')
            for name, verdict in (
                ('ZeRO', plan.sharding),
                ('expert parallelism', plan.experts),
                ('2-D tensor parallelism', plan.grids),
                ('pipeline parallelism', plan.pipelines),
                ('context parallelism', plan.contexts),
                ('sliding windows', plan.windows),
            )
            if verdict
        ),
    )


def _train_error(plan: Plan) -> list[Text]:
    if plan.train_error is None:
        return []
    return [Text(f'train rejects this layout: {plan.train_error}', style='bold red')]


def _what_if(plan: Plan) -> list[RenderableType]:
    """Return a table of changes that save memory; nothing without --what-if."""
    if not plan.what_if:
        return []
    table = open_table(title='what if')
    table.add_column('')
    for name in ('memory', 'saves', 'ms', 'largest microbatch', 'fewest GPUs'):
        table.add_column(name, justify='right')
    table.add_column('')
    first = plan.what_if[0]
    for line in plan.what_if:
        notes = [] if line.is_supported else ['not supported by megajax']
        notes += [f'{si(line.host_bytes)} in host memory'] if line.host_bytes else []
        table.add_row(
            line.name,
            si(line.bytes),
            '' if line is first else si(first.bytes - line.bytes),
            f'{1e3 * line.seconds:,.1f}',
            f'{line.largest_microbatch:,}',
            '-' if line.fewest_gpus is None else f'{line.fewest_gpus:,}',
            '; '.join(notes),
        )
    return [Text(), Folded(table)]


def _load(imbalance: float) -> str:
    """Describe how evenly the experts are loaded."""
    if imbalance == 1:
        return 'experts in balance: every device gets equally many tokens (--imbalance 1)'
    return f'experts: the busiest device gets {imbalance:g} times the mean tokens (--imbalance)'


def memory_table(plan: Plan) -> Table:
    """Return a table of memory, with a row per kind of array."""
    table = open_table(title=f'peak memory per GPU ({plan.memory_moment})')
    table.add_column('')
    table.add_column('memory', justify='right')
    table.add_column('')
    for line in plan.memory:
        if line.bytes:
            table.add_row(line.name.replace('_', ' '), si(line.bytes))
    fits = plan.layout.fits
    note = (
        f'{"fits" if fits else "does not fit"} in {si(plan.memory_available)}; '
        f'largest microbatch {count(plan.largest_microbatch, "sequence")}'
    )
    table.add_row('total', si(plan.layout.bytes), Text(note, style='green' if fits else 'bold red'))
    if not fits and plan.planned().model.attention_dropout:
        table.add_row('', '', plan.layout.reason)
    if plan.compiled_bytes is not None:
        table.add_row(
            'compiled',
            si(plan.compiled_bytes),
            f'the plan predicts {plan.layout.bytes / plan.compiled_bytes:.3f}x this',
        )
    if plan.best_compiled_bytes is not None and plan.config != plan.best_config:
        note = f'the plan predicts {plan.best.bytes / plan.best_compiled_bytes:.3f}x this'
        table.add_row('compiled, fastest layout', si(plan.best_compiled_bytes), note)
    return table


def time_table(plan: Plan) -> Table:
    """Return a table of time, with a row per kind of work; only exposed collectives count."""
    table = open_table(title=f'time per step, {_band(plan)}')
    table.add_column('')
    for name in ('ms', 'share'):
        table.add_column(name, justify='right')
    table.add_column('')
    rows = [('matmul', plan.matmul - plan.idle, '')]
    rows += [('pipeline bubble', plan.idle, 'idle ticks')] if plan.idle else []
    rows += [('memory-bound ops', plan.memory_bound, '')]
    if plan.launches > _SHOWN * plan.seconds:
        rows.append(('launch overhead', plan.launches, ''))
    for axis in dict.fromkeys(transfer.axis for transfer in plan.transfers):
        transfers = [transfer for transfer in plan.transfers if transfer.axis == axis]
        exposed = sum(transfer.exposed for transfer in transfers)
        on_wire = sum(transfer.seconds for transfer in transfers)
        hidden = sum(transfer.hidden for transfer in transfers)
        crosses_hosts = any(transfer.crosses_hosts for transfer in transfers)
        link = 'inter-host' if crosses_hosts else 'intra-host'
        wire_bytes = sum(transfer.wire_bytes for transfer in transfers)
        sent = f'{si(wire_bytes)} in {1e3 * on_wire:,.1f} ms'
        overlap = f'of which {1e3 * hidden:,.1f} ms ({hidden / on_wire:.0%}) overlap matmuls'
        rows.append((f'exposed collectives, {axis}', exposed, f'{link}: {sent}, {overlap}'))
    for name, seconds, note in [*rows, ('total', plan.seconds, '')]:
        table.add_row(name, f'{1e3 * seconds:,.1f}', f'{seconds / plan.seconds:.1%}', note)
    return table


def _band(plan: Plan) -> str:
    """Return the error band of predicted times."""
    return f'\u00b1 {plan.band:.0%}' if plan.band else 'unverified'


def _rates(plan: Plan) -> Text:
    parts = [
        f'{plan.tokens_per_second:,.0f} tokens/s ({_band(plan)})',
        f'{rounded(plan.tflops_per_gpu)} TFLOP/s per GPU',
    ]
    if plan.paper_tflops_per_gpu is not None:
        parts[-1] += f" ({rounded(plan.paper_tflops_per_gpu)} by Narayanan et al.'s formula)"
    parts += [f'MFU {plan.mfu:.1%}', f'HFU {plan.hfu:.1%}']
    if plan.tokens and plan.days:
        parts.append(f'{plan.days:,.1f} days ({_band(plan)}) for {plan.tokens:,.0f} tokens')
    return Text(', '.join(parts))


def _run(plan: Plan) -> list[Text]:
    """Return lines about the full run: GPU-hours, energy, price, checkpoints and failures."""
    cost, faults = plan.cost, plan.faults
    best = f'checkpoint.every={faults.best_every}'
    if faults.best_minutes is not None:
        best += f' checkpoint.minutes={faults.best_minutes}'
    spent = [
        f'{cost.tokens:,.0f} tokens: {count(round(cost.gpu_hours), "GPU-hour")} ({_band(plan)})',
    ]
    if cost.kilowatt_hours is not None:
        spent.append(f'at most {cost.kilowatt_hours:,.0f} kWh (GPUs at their power limit)')
    if cost.cost and cost.tokens_per_unit:
        spent.append(
            f'cost {cost.cost:,.0f} at {cost.price:g} per GPU-hour '
            f'({cost.tokens_per_unit:,.0f} tokens per unit of currency)'
        )
    return [
        Text(', '.join(spent)),
        Text(
            f'checkpoint: {si(faults.checkpoint_bytes)}, {faults.write:,.0f} s to write, '
            f'blocks training for {faults.hold_up:.1f} s'
        ),
        Text(
            f'goodput: {faults.goodput:.2%} with a failure every '
            f'{faults.between_failures / 3600:,.0f} h '
            f'and a checkpoint every {duration(faults.interval)}; '
            f'{faults.best_goodput:.2%} with {best}'
        ),
    ]


def layouts_table(plan: Plan) -> Table:
    """Return a table of the fastest layout of each mesh, and why it is slower than the best.

    Layouts with and without sequence parallelism have separate rows. If no layout of a mesh fits,
    its row shows the smallest. 2-D tensor parallelism has one row. Pipelines have a row for each
    number of stages, with and without context parallelism.
    """
    numbers = number_columns('ms', 'MFU', 'memory')
    title = f'layouts, times {_band(plan)}'
    table = open_table(*text_columns(''), *numbers, 'vs. fastest', title=title)
    for layout in _best_of_each(plan.layouts):
        ms, mfu = (
            (f'{1e3 * layout.seconds:,.1f}', f'{layout.mfu:.1%}')
            if layout.seconds and layout.mfu
            else ('-', '-')
        )
        table.add_row(
            layout.name,
            ms,
            mfu,
            si(layout.bytes),
            layout.reason or 'fastest',
            style=None if layout.fits else 'dim',
        )
    fitting = sum(layout.fits for layout in plan.layouts)
    table.caption = (
        f'{fitting:,} of {len(plan.layouts):,} layouts fit; the table shows the best of each mesh, '
        '--json FILE writes all'
    )
    table.caption_justify = 'left'
    return table


def _impossible(plan: Plan) -> list[Text]:
    """Return a line for each config key that rules out meshes, with the first of these meshes."""
    by_key = defaultdict[str, list[tuple[str, str]]](list)
    for mesh, reason in plan.impossible.items():
        by_key[reason.partition(':')[0]].append((mesh, reason))
    lines = []
    for ruled_out in by_key.values():
        (mesh, reason), *rest = ruled_out
        others = f' (and {count(len(rest), "more mesh", "more meshes")})' if rest else ''
        lines.append(Text(f'{mesh} is not possible: {reason}{others}', style='dim'))
    return lines


def _best_of_each(layouts: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[int, bool] | str, Candidate] = {}
    for layout in layouts:
        if layout.stages * layout.context > 1:
            if layout.fits:
                seen.setdefault((-layout.stages, layout.context > 1), layout)
        elif layout.model_rows == 1:
            seen.setdefault((layout.model, layout.sequence_parallel), layout)
        elif layout.fits:
            seen.setdefault('grid', layout)
    return list(seen.values())
