"""Print a plan of generation as a table."""

from rich.console import Group, RenderableType
from rich.text import Text

from megajax.analysis.plan.generation import Generation, GenerationLine
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.folded import Folded
from megajax.base.render.units import count, si

COLUMNS = 'model', 'weights', 'KV cache', 'prefill ms', 'ms/token', 'all-reduce', 'tokens/s'


def generation_table(plan: Generation) -> RenderableType:
    """Return the table of a plan, for a rich console."""
    table = open_table(*number_columns(*COLUMNS), *text_columns(''))
    for line in plan.lines:
        table.add_row(
            str(line.model),
            si(line.weights),
            si(line.cache),
            f'{1e3 * line.first_token:,.1f}',
            f'{1e3 * line.token:.2f}',
            f'{line.sending / line.token:.0%}',
            f'{line.tokens_per_second:,.0f}',
            '' if line.fits else _misfit(line),
        )
    without = ' without images' if plan.reads_images else ''
    asked = f'{plan.tokens:,} tokens after a prompt of {plan.prompt:,}{without}'
    return Group(
        Text(f'{asked}, {count(plan.batch, "sequence")} at once, {plan.hardware}'),
        Folded(table),
        Text('computed from bytes, matmul FLOPs and latencies; not measured'),
    )


def _misfit(line: GenerationLine) -> str:
    used = line.weights + line.cache + line.prefill
    if line.loading >= used:
        return f'does not fit: loading needs {si(line.loading)}'
    return f'does not fit: weights, KV cache and prefill need {si(used)}'
