"""A plan as tables: on a terminal, and the same as HTML."""

from collections import defaultdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.inspect.report import si
from megajax.plan.result import Layout, Plan
from megajax.render.console import as_html, as_text

_DEFAULT_FRACTION = 0.75  # of the GPU's memory that jax takes unless told otherwise
_AXES = ('model', 'data')
_SHOWN = 5e-4  # of the step, above which short kernels have a line


def to_text(plan: Plan, *, width: int = 150) -> str:
    """Plain text."""
    return as_text(tables(plan), width=width)


def to_html(plan: Plan) -> str:
    """A fragment for a notebook."""
    return as_html(tables(plan))


def tables(plan: Plan) -> RenderableType:
    """Everything, for a rich console."""
    hosts = plan.gpus // plan.gpus_per_host
    origin = 'the fastest layout' if plan.is_from_search else 'as the config says'
    return Group(
        Text(
            f'{plan.gpus} x {plan.hardware}, {hosts} host{"s" if hosts > 1 else ""} of {plan.gpus_per_host}'
        ),
        Text(
            f'{plan.layout.name}: {origin}'
            + (f', as {plan.program} runs it' if plan.program != 'megajax' else '')
        ),
        Text(plan.efficiencies),
        Text(),
        memory_table(plan),
        Text(),
        time_table(plan),
        _rates(plan),
        Text(),
        *_run(plan),
        Text(),
        layouts_table(plan),
        *_impossible(plan),
        Text(),
        Text(f'tensor parallelism  {plan.verdict}', style='bold'),
    )


def memory_table(plan: Plan) -> Table:
    """A row per kind of array."""
    table = Table(
        box=None,
        header_style='bold',
        pad_edge=False,
        title=f'memory per GPU, at its peak ({plan.memory_moment})',
        title_justify='left',
    )
    table.add_column('')
    table.add_column('bytes', justify='right')
    table.add_column('')
    for line in plan.memory:
        if line.bytes:
            table.add_row(line.name, si(line.bytes))
    fits = plan.layout.fits
    note = f'{"fits" if fits else "does not fit"} in {si(plan.memory_available)}; largest microbatch {plan.largest_microbatch} rows'
    if fits and plan.layout.bytes > _DEFAULT_FRACTION / 0.92 * plan.memory_available:
        note += '; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.92'
    table.add_row('total', si(plan.layout.bytes), Text(note, style='green' if fits else 'bold red'))
    if plan.compiled_bytes is not None:
        table.add_row(
            'compiled',
            si(plan.compiled_bytes),
            f"the plan's total is {plan.layout.bytes / plan.compiled_bytes:.3f} of it",
        )
    if plan.best_compiled_bytes is not None and plan.config != plan.best_config:
        note = f"the plan's total is {plan.best.bytes / plan.best_compiled_bytes:.3f} of it"
        table.add_row('compiled, the fastest layout', si(plan.best_compiled_bytes), note)
    return table


def time_table(plan: Plan) -> Table:
    """A row per kind of work; of collectives what nothing hides."""
    table = Table(
        box=None,
        header_style='bold',
        pad_edge=False,
        title=f'time per step, {_band(plan)}',
        title_justify='left',
    )
    table.add_column('')
    for name in ('ms', 'share'):
        table.add_column(name, justify='right')
    table.add_column('')
    rows = [('matrix products', plan.products, ''), ('bound by memory', plan.memory_bound, '')]
    rows += [('short kernels', plan.launches, '')] if plan.launches > _SHOWN * plan.seconds else []
    for axis in _AXES:
        over = [one for one in plan.transfers if one.axis == axis]
        if over:
            exposed, whole = sum(one.exposed for one in over), sum(one.seconds for one in over)
            hidden = sum(one.hidden for one in over)
            link = 'between hosts' if any(one.crosses_hosts for one in over) else 'inside a host'
            sent = f'{si(sum(one.wire_bytes for one in over))} in {1e3 * whole:,.1f} ms'
            share = f'{1e3 * hidden:,.1f} ({hidden / whole:.0%}) of it beside products'
            note = f'{link}, {sent}, {share}'
            rows.append((f'collectives over {axis}', exposed, note))
    for name, seconds, note in [*rows, ('total', plan.seconds, '')]:
        table.add_row(name, f'{1e3 * seconds:,.1f}', f'{seconds / plan.seconds:.1%}', note)
    return table


def _band(plan: Plan) -> str:
    """How far a time may be off."""
    return f'\u00b1 {plan.band:.0%}' if plan.band else 'unverified'


def _rates(plan: Plan) -> Text:
    parts = [
        f'{plan.tokens_per_second:,.0f} tokens/s ({_band(plan)})',
        f'{plan.tflops_per_gpu:.3g} TFLOP/s per GPU',
    ]
    if plan.paper_tflops_per_gpu is not None:
        parts[-1] += f" ({plan.paper_tflops_per_gpu:.3g} by the paper's formula)"
    parts += [f'MFU {plan.mfu:.1%}', f'HFU {plan.hfu:.1%}']
    if plan.tokens and plan.days:
        parts.append(f'{plan.days:,.1f} days ({_band(plan)}) for {plan.tokens:,.0f} tokens')
    return Text(', '.join(parts))


def _run(plan: Plan) -> list[Text]:
    """What the whole run takes beside its steps."""
    cost, faults = plan.cost, plan.faults
    spent = [
        f'{cost.tokens:,.0f} tokens take {cost.gpu_hours:,.0f} GPU hours ({_band(plan)})',
        f'{cost.kilowatt_hours:,.0f} kWh at the limit of the boards',
    ]
    if cost.cost and cost.tokens_per_unit:
        spent.append(
            f'{cost.cost:,.0f} at {cost.price:g} a GPU hour, {cost.tokens_per_unit:,.0f} tokens for 1'
        )
    written = (
        f'is on disk after {faults.write:,.0f} s and holds the steps up for {faults.hold_up:.1f} s'
    )
    return [
        Text(', '.join(spent)),
        Text(f'a checkpoint of {si(faults.checkpoint_bytes)} {written}'),
        Text(
            f'goodput {faults.goodput:.2%} with a failure every {faults.between_failures / 3600:,.0f} hours '
            f'and a checkpoint every {faults.interval / 60:,.0f} minutes; '
            f'{faults.best_goodput:.2%} with checkpoint.every={faults.best_every}'
        ),
    ]


def layouts_table(plan: Plan) -> Table:
    """The fastest of each mesh with and without sequence parallelism, and why it lost; for those that do not fit, the smallest."""
    table = Table(
        box=None,
        header_style='bold',
        pad_edge=False,
        title=f'layouts, times {_band(plan)}',
        title_justify='left',
    )
    table.add_column('', no_wrap=True)
    for name in ('ms', 'MFU', 'bytes'):
        table.add_column(name, justify='right', no_wrap=True)
    table.add_column('')
    for one in _best_of_each(plan.layouts):
        ms, mfu = (
            (f'{1e3 * one.seconds:,.1f}', f'{one.mfu:.1%}')
            if one.seconds and one.mfu
            else ('-', '-')
        )
        table.add_row(
            one.name,
            ms,
            mfu,
            si(one.bytes),
            one.reason or 'the fastest',
            style=None if one.fits else 'dim',
        )
    count = sum(one.fits for one in plan.layouts)
    table.caption = f'{count} of {len(plan.layouts)} layouts fit; the best of each mesh is shown, --json has all'
    table.caption_justify = 'left'
    return table


def _impossible(plan: Plan) -> list[Text]:
    """A line for each reason's key, with the first of the meshes that it rules out in full."""
    by_key = defaultdict[str, list[tuple[str, str]]](list)
    for mesh, reason in plan.impossible.items():
        by_key[reason.partition(':')[0]].append((mesh, reason))
    lines = []
    for ruled_out in by_key.values():
        others = f', and {len(ruled_out) - 1} more meshes' if len(ruled_out) > 1 else ''
        lines.append(Text(f'{ruled_out[0][0]} cannot be: {ruled_out[0][1]}{others}', style='dim'))
    return lines


def _best_of_each(layouts: list[Layout]) -> list[Layout]:
    seen: dict[tuple[int, bool], Layout] = {}
    for one in layouts:
        seen.setdefault((one.model, one.sequence_parallel), one)
    return list(seen.values())
