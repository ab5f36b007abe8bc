"""Text from elsewhere, as it may stand in a line of a message."""


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


_CONTROL = {*range(0x20), *range(0x7F, 0xA0)} - {ord('\n'), ord('\t')}
# Marks, embeddings, overrides and isolates of Unicode's bidirectional algorithm, which can show a
# text in another order than it has, and its separators of lines.
_DIRECTION = {0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
_VISIBLE = {code: f'\\x{code:02x}' for code in _CONTROL} | {
    code: f'\\u{code:04x}' for code in _DIRECTION
}
