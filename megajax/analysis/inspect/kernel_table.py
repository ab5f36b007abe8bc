"""The tables of `megajax inspect --kernels`."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table

from megajax.analysis.inspect.kernels import Total, total, totals
from megajax.analysis.inspect.result import Inspection
from megajax.base.render.console import number_columns, open_table, text_columns
from megajax.base.render.folded import Folded

LONGEST = 20  # groups of kernels that are listed one by one
_NUMBERS = 'launches', 'GB', 'TFLOP', 'ms', 'share'


def kernel_tables(inspection: Inspection) -> RenderableType:
    """Return tables of a GPU program's kernels: by kind and site, and by source line."""
    by_kind = totals(inspection.kernels, lambda kernel: (kernel.kind, kernel.site, kernel.phase))
    by_line = totals(
        inspection.kernels, lambda kernel: (kernel.kind, own_line(kernel.source), kernel.phase)
    )
    whole = total(inspection.kernels)
    longest = [*by_line.items()][:LONGEST]
    lines = 'kind', 'line', 'phase'
    title = 'kernels per step: roofline estimates at the rates above, not measured'
    return Group(
        Folded(_table(title, ('kind', 'site', 'phase'), by_kind.items(), whole)),
        '',
        Folded(_table(f'the {len(longest)} source lines that take longest', lines, longest, whole)),
    )


def _table(
    title: str,
    names: tuple[str, ...],
    groups: Iterable[tuple[tuple[str, ...], Total]],
    whole: Total,
) -> Table:
    table = open_table(*text_columns(*names), *number_columns(*_NUMBERS), title=title)
    for key, group in groups:
        table.add_row(*key, *_numbers(group, whole))
    table.add_row('total', '', '', *_numbers(whole, whole), style='bold')
    return table


def _numbers(group: Total, whole: Total) -> list[str]:
    share = group.seconds / whole.seconds if whole.seconds else 0.0
    return [
        f'{group.launches:,}',
        f'{group.bytes / 1e9:,.2f}',
        f'{group.flops / 1e12:,.2f}' if group.flops else '-',
        f'{1e3 * group.seconds:,.2f}',
        f'{share:.1%}',
    ]


def own_line(source: str) -> str:
    """Return the innermost of these Python frames that is in megajax, or else in a library."""
    frames = source.split(' < ')
    ours = (frame.rpartition('megajax/')[2] for frame in frames if 'megajax/' in frame)
    return next(ours, frames[0].rpartition('site-packages/')[2]) or '-'
