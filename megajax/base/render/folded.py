"""Tables that fit into a narrow terminal by moving cells of a row below the others."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

WRAPPED = 10  # minimum width of a cell that may be wrapped, in terminal columns
GAP, INDENT = 2, 2  # terminal columns between cells, and before cells below a row


@dataclasses.dataclass(frozen=True)
class Folded:
    """A table that is folded if it does not fit the terminal.

    In a folded table, each row begins with the cells that fit next to each other. The widest cells
    follow on lines of their own, after their column names. If the first cell takes more than half
    of the width, it gets a line above the row. A cell that fits on a line is never cut. `names`
    replaces column names in a folded table.
    """

    table: Table
    names: Mapping[int, str] = dataclasses.field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [_Column.of(column, console) for column in self.table.columns]
        if _total(columns) <= options.max_width:
            yield self.table
            return
        renamed = [
            dataclasses.replace(column, header=self.names.get(place, column.header))
            for place, column in enumerate(columns)
        ]
        yield from _folded(self.table, renamed, options.max_width)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self.table)


@dataclasses.dataclass(frozen=True)
class _Column:
    header: str
    cells: list[Text]
    content: int  # width of the longest line
    may_wrap: bool
    is_right: bool

    @classmethod
    def of(cls, column: Column, console: Console) -> '_Column':
        cells = [
            cell.copy()
            if isinstance(cell, Text)
            else console.render_str(str(cell), highlight=False)
            for cell in column.cells
        ]
        header = str(column.header)
        lines = [line for cell in cells for line in cell.split('\n', allow_blank=True)]
        content = max((line.cell_len for line in lines), default=0)
        return cls(header, cells, content, not column.no_wrap, column.justify == 'right')

    @property
    def width(self) -> int:
        """Width in terminal columns."""
        return max(len(self.header), self.content)

    @property
    def needed(self) -> int:
        """Smallest readable width in terminal columns."""
        return min(self.width, WRAPPED) if self.may_wrap else self.width


def _total(columns: Sequence[_Column]) -> int:
    return sum(column.needed for column in columns) + GAP * len(columns)


def _folded(table: Table, columns: list[_Column], width: int) -> Iterator[Text | Table | Padding]:
    first, *others = columns
    leads = first.needed > width // 2
    fitting = others if leads else columns
    below = list[_Column]()
    while _total(fitting) > width - INDENT * leads and len(fitting) > 1:
        widest = max(fitting if leads else fitting[1:], key=lambda column: column.needed)
        fitting = [column for column in fitting if column is not widest]
        below.insert(0, widest)
    below.sort(key=columns.index)
    indent = INDENT if leads else 0
    widths = _widths(fitting, width - indent)
    if table.title:
        yield Text(str(table.title), style='table.title')
    if table.show_header and leads and first.header:
        yield Text(first.header, style='bold')
    if table.show_header and any(column.header for column in fitting):
        headers = [Text(column.header, style='bold') for column in fitting]
        yield Padding.indent(_line(fitting, widths, headers), indent)
    for number, row in enumerate(table.rows):
        style = row.style or ''
        if leads:
            yield _styled(first.cells[number], style)
        cells = [_styled(column.cells[number], style) for column in fitting]
        yield Padding.indent(_line(fitting, widths, cells), indent)
        yield from _below(below, number, width)
    if table.caption:
        yield Text(str(table.caption), style='table.caption')


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Return the widths of cells: the needed ones, and the remaining width for wrappable cells."""
    left, widths = width - _total(columns), list[int]()
    for column in columns:
        more = min(max(left, 0), column.width - column.needed)
        left -= more
        widths.append(column.needed + more)
    return widths


def _line(columns: Sequence[_Column], widths: Sequence[int], cells: Sequence[Text]) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(justify='right' if column.is_right else 'left', width=width)
    grid.add_row(*cells)
    return grid


def _below(columns: Sequence[_Column], number: int, width: int) -> Iterator[Padding]:
    """Yield lines of the cells that go below a row, with as many cells per line as fit."""
    line, left = list[Text](), 0
    for column in columns:
        cell = column.cells[number]
        if cell.plain in ('', '-'):
            continue
        lines = cell.split('\n', allow_blank=True)
        needed = len(column.header) + max(part.cell_len for part in lines) + 2 * GAP
        if line and needed > left:
            yield _in_line(line)
            line = []
        left = (left if line else width - INDENT) - needed
        line += [Text(column.header, style='dim'), cell]
    if line:
        yield _in_line(line)


def _in_line(cells: Sequence[Text]) -> Padding:
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, GAP, 0, 0))
    grid.add_row(*cells)
    return Padding.indent(grid, INDENT)


def _styled(cell: Text, style: object) -> Text:
    shown = cell.copy()
    if style:
        shown.stylize(style)  # type: ignore[arg-type]
    return shown
