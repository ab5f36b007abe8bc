"""A plan of generation as a table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megajax.analysis.plan.generation import Generation
from megajax.base.render.folded import Folded
from megajax.base.render.units import si

COLUMNS = 'model', 'weights', 'cache', 'first token', 'a token', 'in all-reduces', 'tokens/s'


def generation_table(plan: Generation) -> RenderableType:
    """Return the table of a plan, for a rich console."""
    table = Table(box=None, header_style='bold', pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify='right', no_wrap=True)
    table.add_column('', no_wrap=True)
    for line in plan.lines:
        table.add_row(
            str(line.model),
            si(line.weights),
            si(line.cache),
            f'{1e3 * line.first_token:,.1f} ms',
            f'{1e3 * line.token:.2f} ms',
            f'{line.sending / line.token:.0%}',
            f'{line.tokens_per_second:,.0f}',
            '' if line.fits else 'does not fit',
        )
    rows = 'row' if plan.batch == 1 else 'rows'
    return Group(
        Text(f'{plan.tokens} tokens after {plan.prompt}, {plan.batch} {rows}, {plan.hardware}'),
        Folded(table),
        Text('computed from bytes, products and latencies; not measured'),
    )
