"""Make text from elsewhere safe and short enough for a message."""

import re
import shlex

INDENT, CONTINUED = 11, 4  # columns before a value, and before a continuation line
MIN_WIDTH = 40  # columns
_VALUE = re.compile(rf'(?=.{{{INDENT - 1}}} \S)[\w ]+')


def shorten(text: str, limit: int = 80) -> str:
    """Shorten a text to `limit` characters, keeping its beginning, its end and its length."""
    if len(text) <= limit:
        return text
    middle = f'...({len(text):,} characters)...'
    kept = max(limit - len(middle), 3)
    return text[: kept - kept // 3] + middle + text[-(kept // 3) :]


def visible(text: str) -> str:
    r"""Return a text with control characters, changes of direction and surrogates escaped.

    For example, an escape becomes \x1b. Newlines and tabs are unchanged. A surrogate stands for a
    byte of a file name that is not UTF-8.
    """
    return text.translate(_VISIBLE)


def in_line(text: str, limit: int) -> str:
    r"""Shorten a text to `limit` characters, with \n for each newline."""
    return shorten(text, limit).replace('\n', r'\n')


def typed(word: object) -> str:
    """Return a word as it is typed in a shell, in quotes if necessary."""
    return shlex.quote(str(word))


def folded(text: str, width: int) -> str:
    """Wrap the lines of a text at `width` columns; indent continuation lines below the value.

    In the lines that a run prints, the value begins after a name, in column INDENT. Long words are
    not broken.
    """
    return '\n'.join(
        part for line in text.splitlines() for part in (_parts(line, width) if line else [''])
    )


def _parts(line: str, width: int) -> list[str]:
    """Break a line at spaces; the other spaces are unchanged."""
    indent = ' ' * (INDENT if _VALUE.match(line) else CONTINUED)
    parts, rest = list[str](), line
    while len(rest) > max(width, MIN_WIDTH):
        end = rest.rfind(' ', len(indent) + 1, width + 1)
        end = end if end > 0 else rest.find(' ', width)
        if end < 0:
            break
        parts.append(rest[:end].rstrip())
        rest = indent + rest[end:].lstrip()
    return [*parts, rest]


_CONTROL = {*range(0x20), *range(0x7F, 0xA0)} - {ord('\n'), ord('\t')}
# Marks, embeddings, overrides and isolates of Unicode's bidirectional algorithm, which can display
# a text in a different order, and line separators.
_DIRECTION = {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
_VISIBLE = {code: f'\\x{code:02x}' for code in _CONTROL} | {
    code: f'\\u{code:04x}' for code in (*_DIRECTION, *range(0xD800, 0xE000))
}
