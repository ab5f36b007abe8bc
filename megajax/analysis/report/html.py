"""Make HTML from Python values; values that are not `Html` are escaped, and never markup."""

import html
from collections.abc import Iterable, Sequence

from megajax.base.render.text import visible

_VOID = ('meta', 'img', 'path', 'line', 'circle', 'br')


class Html(str):
    """Markup that can safely be put into a page unchanged."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escape a value; invisible characters are written as in Python: \\u202e."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(visible(str(value))))


def element(tag: str, /, *content: object, **attributes: object) -> Html:
    """Return an element; `_` in attribute names becomes a hyphen, or is removed at the ends.

    Attributes whose value is None or empty are omitted.
    """
    written = ''.join(
        f' {key.strip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value not in (None, '')
    )
    if tag in _VOID:
        return Html(f'<{tag}{written}/>')
    return Html(f'<{tag}{written}>{join(content)}</{tag}>')


def join(parts: Iterable[object], between: object = '') -> Html:
    """Return the parts one after another, each escaped unless it is markup."""
    return Html(str(text(between)).join(map(text, parts)))


def table(
    head: Sequence[object], rows: Iterable[Sequence[object]], *, names: int = 1, wide: bool = False
) -> Html:
    """Return a table whose first `names` columns are text, and the others numbers.

    A `wide` table does not wrap the lines of its cells, and scrolls if the page is narrow.
    """

    def cells(kind: str, row: Sequence[object]) -> Html:
        return element(
            'tr',
            *(
                element(kind, cell, class_='' if place < names else 'number')
                for place, cell in enumerate(row)
            ),
        )

    body = [cells('td', row) for row in rows]
    whole = element(
        'table', element('thead', cells('th', head)), element('tbody', *body), class_='data'
    )
    return element('div', whole, class_='scroll wide' if wide else 'scroll', tabindex='0')


def details(summary: object, *content: object, is_open: bool = False) -> Html:
    """Return content that is hidden until the reader opens it."""
    return element(
        'details', element('summary', summary), *content, open='open' if is_open else None
    )
