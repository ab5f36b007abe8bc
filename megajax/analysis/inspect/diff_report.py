"""The difference of two inspections, as text for a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from megajax.analysis.inspect.diff import LEAST, Change, Difference
from megajax.base.render.console import open_table
from megajax.base.render.folded import Folded
from megajax.base.render.units import si

NOT_MEASURED = 'Milliseconds are roofline estimates of the compiled programs, not measurements.'


def to_tables(found: Difference) -> RenderableType:
    """Return the tables for a rich console."""
    parts: list[RenderableType] = []
    for title, names, rows in _sections(found):
        table = open_table(title=title)
        for index, name in enumerate(names):
            table.add_column(name, justify='left' if index == 0 else 'right')
        for row in rows:
            table.add_row(*row)
        parts += [Folded(table), Text()]
    return Group(*parts, *map(Text, _lines(found)), Text(NOT_MEASURED, style='dim'))


def _sections(found: Difference) -> Iterator[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """Yield the title, the columns and the rows of each table that is not empty."""
    if found.keys:
        yield 'config', ('key', 'before', 'after'), [*found.keys]
    columns = 'per step and device', 'before', 'after', 'change'
    yield 'step', columns, [cells(change) for change in found.totals]
    if found.parts:
        title = f'parts that differ by more than {LEAST:.1%} of the step'
        yield title, columns, [cells(change) for change in found.parts]
    columns = 'at its peak', 'before', 'after', 'change'
    if found.memory:
        yield 'memory per device', columns, [cells(change) for change in found.memory]
    if found.arrays:
        title = f'arrays that differ by more than {LEAST:.1%} of the memory'
        yield title, columns, [cells(change) for change in found.arrays]


def cells(change: Change) -> tuple[str, ...]:
    """Return the name, both numbers and the relative change, as the cells of a row."""
    before, after = (number(value, change.unit) for value in (change.before, change.after))
    return change.name, before, after, change.text


def number(value: float, unit: str) -> str:
    """Format a number of a step in its unit."""
    if unit == 'B':
        return si(value)
    return f'{value:,.3f} {unit}' if unit else f'{value:,.0f}'


def _lines(found: Difference) -> Iterator[str]:
    for words, findings in (('new', found.new), ('resolved', found.gone)):
        for finding in findings:
            yield f'{words} {finding.level}: {finding.rule}: {finding.message}'
    if not (found.keys or found.parts or found.arrays or found.new or found.gone):
        yield 'no differences'
    yield from found.not_compared
