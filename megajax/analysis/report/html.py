"""HTML from Python values: what is not `Html` is escaped, so that no text of a run is markup."""

import html
import unicodedata
from collections.abc import Iterable, Sequence

# Marks that reorder the text around them, so that it reads as something that it is not.
_BIDIRECTIONAL = frozenset(
    '\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069'
)
_UNPAIRED = ('Cc', 'Cs')  # control characters, and surrogates, which have no UTF-8
_VOID = ('meta', 'img', 'path', 'line', 'circle', 'br')


class Html(str):
    """Markup that is safe to be put into a page as it is."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escape a value; characters that cannot be seen are spelled as Python would: \\u202e."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(''.join(map(_visible, str(value)))))


def element(tag: str, /, *content: object, **attributes: object) -> Html:
    """Return an element; an underscore in the name of an attribute is a hyphen or left out.

    Attributes that are None or empty are left out.
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

    A `wide` one keeps the lines of its cells, and scrolls where the page is narrow.
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
    """Return content that a reader opens."""
    return element(
        'details', element('summary', summary), *content, open='open' if is_open else None
    )


def _visible(character: str) -> str:
    if character in '\n\t':
        return character
    if character in _BIDIRECTIONAL or unicodedata.category(character) in _UNPAIRED:
        code = ord(character)
        return f'\\x{code:02x}' if code < 0x100 else f'\\u{code:04x}'
    return character
