"""A table on a narrow terminal loses no cell, and cuts none that a line can hold."""

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from megajax.base.render.console import as_text
from megajax.base.render.folded import Folded

CELLS = st.text('abc[]:', min_size=1, max_size=24)
ROWS = st.integers(2, 7).flatmap(
    lambda columns: st.lists(
        st.lists(CELLS, min_size=columns, max_size=columns), min_size=1, max_size=4
    )
)


def table(rows: list[list[str]], *, no_wrap: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, header_style='bold', title='title')
    for number in range(len(rows[0])):
        table.add_column(f'column{number}', no_wrap=no_wrap)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def lines(shown: object, width: int) -> list[str]:
    return [line.rstrip() for line in as_text(shown, width=width).splitlines()]


@settings(deadline=None)
@given(ROWS, st.integers(40, 160))
def test_every_cell_is_whole_on_a_line_of_any_terminal(rows: list[list[str]], width: int) -> None:
    shown = lines(Folded(table(rows)), width)
    assert all(len(line) <= width for line in shown)
    rest = '\n'.join(shown)
    for row in rows:
        for cell in row:
            assert cell in rest
    for number in range(len(rows[0])):
        assert f'column{number}' in rest


def test_a_table_that_fits_is_shown_as_it_is() -> None:
    wide = table([['a', 'b', 'c'], ['d', 'e', 'f']])
    assert as_text(Folded(wide), width=40) == as_text(wide, width=40)


def test_the_widest_cells_stand_below_with_the_names_of_their_columns() -> None:
    rows = [['site', 'x' * 20, 'equal'], ['head', 'y' * 20, 'less']]
    assert lines(Folded(table(rows)), 33) == [
        'title',
        'column0  column2',
        'site     equal',
        f'  column1  {"x" * 20}',
        'head     less',
        f'  column1  {"y" * 20}',
    ]


def test_a_long_name_stands_above_its_row() -> None:
    assert lines(Folded(table([['n' * 30, '12.5', 'why']])), 40) == [
        'title',
        'column0',
        '  column1  column2',
        'n' * 30,
        '  12.5     why',
    ]


def test_cells_of_several_lines_stand_beside_each_other() -> None:
    rows = [['mlp', '1 AG\n1 RS', '2 AG\n1 RS', 'equal' * 4]]
    assert lines(Folded(table(rows)), 40)[-3:] == [
        'mlp      1 AG     2 AG',
        '         1 RS     1 RS',
        f'  column3  {"equal" * 4}',
    ]


def test_text_may_be_broken_where_its_column_allows() -> None:
    reason = 'words ' * 12
    shown = lines(Folded(table([['a', reason]], no_wrap=False)), 48)
    assert len(shown) > 3
    assert ' '.join(' '.join(shown).split()).count('words') == 12
