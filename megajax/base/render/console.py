"""Render rich tables as plain text or HTML, wherever this process writes its output."""

import io
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table

_STYLE = (
    'font-family: monospace; font-size: 85%; line-height: 1.25; white-space: pre; overflow-x: auto'
)
UNWRAPPED = 1000  # columns
_HTML = f'<pre style="{_STYLE}">{{code}}</pre>'


def open_table(*columns: Column | str, title: str | None = None) -> Table:
    """Return a table without lines; column names are bold, and the title is on the left."""
    table = Table(*columns, box=None, header_style='bold', pad_edge=False)
    table.title, table.title_justify = title, 'left'
    return table


def text_columns(*headers: str) -> list[Column]:
    """Return columns whose cells are not wrapped."""
    return [Column(header, no_wrap=True) for header in headers]


def number_columns(*headers: str) -> list[Column]:
    """Return columns whose cells are on the right and not wrapped."""
    return [Column(header, justify='right', no_wrap=True) for header in headers]


def plain_console(**settings: Any) -> Console:
    """Return a console that prints text as it is: without colored words, styles and emoji codes."""
    return Console(highlight=False, emoji=False, markup=False, **settings)


def print_fitting(shown: RenderableType, console: Console) -> None:
    """Print to a terminal what fits it; to a pipe or a file, each row of a table as one line."""
    if console.is_terminal:
        console.print(shown)
    else:
        lines = as_text(shown, width=UNWRAPPED).splitlines()
        console.print('\n'.join(line.rstrip() for line in lines), soft_wrap=True)


def as_text(shown: RenderableType, *, width: int = 150) -> str:
    """Return the output of a rich console as plain text."""
    console = plain_console(width=width, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def as_html(shown: RenderableType) -> str:
    """Return the output of a rich console as an HTML fragment for a notebook."""
    file = io.StringIO()
    console = plain_console(file=file, width=150, record=True, force_jupyter=False)
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=_HTML)
