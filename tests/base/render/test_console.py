"""What a terminal would show, as plain text and as a fragment of HTML."""

import pytest
from rich.table import Table
from rich.text import Text

from megajax.base.render.console import as_html, as_text, plain_console


def table() -> Table:
    table = Table('name', 'bytes', box=None, header_style='bold')
    table.add_row('weight', '1,024')
    return table


@pytest.mark.parametrize('colour', [None, '1'])
def test_plain_text_has_no_escapes_even_where_a_terminal_would(
    colour: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if colour:
        monkeypatch.setenv('FORCE_COLOR', colour)  # what makes rich take any output for a terminal
    assert as_text(table()).splitlines() == [' name    bytes ', ' weight  1,024 ']


@pytest.mark.parametrize('width', [20, 150])
def test_a_line_breaks_at_the_width(width: int) -> None:
    assert as_text(Text('x' * width), width=width) == 'x' * width + '\n'
    assert as_text(Text('x' * (width + 1)), width=width) == 'x' * width + '\nx\n'


def test_both_are_150_wide_unless_told() -> None:
    assert as_text(Text('x' * 151)) == 'x' * 150 + '\nx\n'
    assert f'{"x" * 150}\nx\n' in as_html(Text('x' * 151))


def test_html_is_one_element_that_brings_its_styles_along() -> None:
    html = as_html(table())
    assert html.startswith('<pre style="font-family: monospace; ')
    assert html.endswith('</pre>')
    assert '<span style="font-weight: bold"> name  ' in html
    assert 'class=' not in html


def test_only_what_is_styled_is_coloured() -> None:
    assert '<span' not in as_html("1,024 bytes, True, 'text', /a/path")


def test_inside_a_notebook_the_same_is_returned_and_nothing_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, html = as_text(table()), as_html(table())
    monkeypatch.setattr('rich.console._is_jupyter', lambda: True)
    assert (as_text(table()), as_html(table())) == (text, html)
    assert capsys.readouterr() == ('', '')


def test_names_between_colons_are_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table('name', box=None)
    table.add_row(':smile:')
    plain_console().print(table)
    assert ':smile:' in capsys.readouterr().out
    assert ':smile:' in as_text(table)
    assert ':smile:' in as_html(table)
