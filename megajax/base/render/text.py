"""Text from elsewhere, as it may stand in a line of a message."""

import re
import shlex

INDENT, CONTINUED = 11, 4  # columns before a value, and before the rest of another line
MIN_WIDTH = 40  # columns
_VALUE = re.compile(rf'(?=.{{{INDENT - 1}}} \S)[\w ]+')


def shorten(text: str, limit: int = 80) -> str:
    """Return a text of at most `limit` characters, with its beginning, its end and its length."""
    if len(text) <= limit:
        return text
    middle = f'...({len(text):,} characters)...'
    kept = max(limit - len(middle), 3)
    return text[: kept - kept // 3] + middle + text[-(kept // 3) :]


def visible(text: str) -> str:
    r"""Return a text whose control characters and changes of direction are seen, not obeyed.

    An escape becomes \x1b. Newlines and tabs stay.
    """
    return text.translate(_VISIBLE)


def in_line(text: str, limit: int) -> str:
    r"""Return a text of at most `limit` characters, with \n for a newline."""
    return shorten(text, limit).replace('\n', r'\n')


def typed(word: object) -> str:
    """Return a word of a command as it is typed in a shell, in quotes if it needs them."""
    return shlex.quote(str(word))


def folded(text: str, width: int) -> str:
    """Return a text whose lines are broken at spaces to `width` columns, below their values.

    A value begins after the name of a line of a run, in column INDENT. Longer words stay whole.
    """
    return '\n'.join(
        part for line in text.splitlines() for part in (_parts(line, width) if line else [''])
    )


def _parts(line: str, width: int) -> list[str]:
    """Break a line at its spaces; spaces within a part stay as they are."""
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
# Marks, embeddings, overrides and isolates of Unicode's bidirectional algorithm, which can show a
# text in another order than it has, and its separators of lines.
_DIRECTION = {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
_VISIBLE = {code: f'\\x{code:02x}' for code in _CONTROL} | {
    code: f'\\u{code:04x}' for code in _DIRECTION
}
