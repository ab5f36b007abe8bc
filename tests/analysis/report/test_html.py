"""No value becomes markup, and none hides what it says."""

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.analysis.report.html import Html, element, table, text


class Parsed(HTMLParser):
    """The tags of a text, the values of their attributes, and the rest."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.data = ''
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or '' for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.data += data


@given(st.text(st.characters(exclude_categories=['Cc', 'Cs', 'Cf', 'Zl', 'Zp'])))
def test_any_value_is_read_back_as_it_was_and_makes_no_tag(value: str) -> None:
    parsed = Parsed(element('p', value, title=value))
    assert parsed.tags == ['p']
    assert parsed.data == value
    assert parsed.values == ([value] if value else [])


@given(st.text())
def test_any_value_can_be_written_as_utf_8(value: str) -> None:
    element('p', value).encode()


@pytest.mark.parametrize(
    ('value', 'shown'),
    [
        ('a\u202eb', 'a\\u202eb'),
        ('\u2066x\u2069', '\\u2066x\\u2069'),
        ('\x1b[31mred\x00', '\\x1b[31mred\\x00'),
        ('\x9b', '\\x9b'),
        ('a\u2028b', 'a\\u2028b'),
        ('\ud800', '\\ud800'),
        ('two\n\tlines', 'two\n\tlines'),
        ('👩‍🚀', '👩‍🚀'),
    ],
)
def test_what_cannot_be_seen_is_spelled_out(value: str, shown: str) -> None:
    assert text(value) == shown


def test_markup_is_kept_and_nested() -> None:
    assert element('b', Html('<i>x</i>'), '<') == '<b><i>x</i>&lt;</b>'


def test_a_table_has_its_numbers_on_the_right() -> None:
    shown = table(['name', 'count'], [['<a>', 3]])
    assert '<td>&lt;a&gt;</td><td class="number">3</td>' in shown
