"""Tokenize a long text in parts, with the same result as in one piece.

The `tokenizers` library needs over 100 bytes of memory per byte of text, so a long text is encoded
in parts. A tokenizer may add a space before a text, strip its blanks or merge across a cut, so each
part is encoded together with its neighborhood. A window around each cut, which is the same for the
parts on both sides, tells how many tokens belong to the neighborhood.
"""

import re
from collections.abc import Callable, Iterator, Sequence

from megajax.base.errors import ConfigError, Problem

PART = 1 << 20  # characters that are encoded at a time
WHOLE = 1 << 24  # characters that are encoded at a time if a tokenizer allows no cut
AROUND = 256  # number of bytes on each side of a cut that are encoded with a part
# Possible places for a cut, by preference: between lines that are neither blank nor indented,
# before such a line, before a word.
CUTS = re.compile(r'(?<=\S\n)(?=\S)'), re.compile(r'(?<=\n)(?=\S)'), re.compile(r'(?<=\w)(?= \w)')

Encode = Callable[[str], Sequence[int]]
Locate = Callable[[str], tuple[Sequence[int], Sequence[int]]]  # ids, and the start of each token


class UncuttableError(ConfigError):
    """An error for a tokenizer whose result for parts of a text differs from the whole."""

    def __init__(self) -> None:
        super().__init__(
            Problem(
                'data.tokenizer',
                'does not read a long text in parts as it reads the whole; '
                'split the text into several documents',
            )
        )


def encode_in_parts(
    text: str, before: str, after: str, encode: Encode, locate: Locate
) -> Iterator[Sequence[int]]:
    """Yield the ids of consecutive parts of a text between `before` and `after` in a document.

    Parts have up to PART characters, or up to WHOLE if no cut is found. Raises UncuttableError if a
    longer part would be needed, or if the tokens around a cut depend on more than AROUND bytes.
    """
    start = 0
    for part in parts(text):
        if len(part) > WHOLE:
            raise UncuttableError
        end = start + len(part)
        left = tail(before + text[max(start - AROUND, 0) : start])
        right = head(text[end : end + AROUND] + after)
        ids = encode(left + part + right)
        first, last = 0, len(ids)
        if left:
            first = _tokens_before(left, head(part + right), ids, locate)
        if right:
            last -= _tokens_after(tail(left + part), right, ids, locate)
        yield ids[first:last]
        start = end


def parts(text: str) -> Iterator[str]:
    """Yield consecutive parts of a text, cut at words.

    A part has up to PART characters, or more if there is no word at which to cut.
    """
    start = 0
    while len(text) - start > PART:
        end = next(_candidates(text, start), len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def head(text: str) -> str:
    """Return the whole characters in the first AROUND bytes of a text."""
    return text[:AROUND].encode()[:AROUND].decode(errors='ignore')


def tail(text: str) -> str:
    """Return the whole characters in the last AROUND bytes of a text."""
    return text[-AROUND:].encode()[-AROUND:].decode(errors='ignore')


def _candidates(text: str, start: int) -> Iterator[int]:
    """Yield candidates for a cut in the second half of a part, the last one of each kind.

    After these, yield candidates for longer parts, up to WHOLE.
    """
    size = PART
    while size <= WHOLE and start + size // 2 < len(text):
        for pattern in CUTS:
            found = [cut.start() for cut in pattern.finditer(text, start + size // 2, start + size)]
            yield from found[-1:]
        size *= 2


def _tokens_before(left: str, right: str, ids: Sequence[int], locate: Locate) -> int:
    """Return how many of the `ids` of a text are before the cut that follows its beginning `left`.

    Up to the middle of `right`, the window around the cut must have the same tokens as the text.
    """
    window, starts = locate(left + right)
    number = sum(start < len(left) for start in starts)
    compared = sum(start < len(left) + len(right) / 2 for start in starts)
    if not number or list(ids[:compared]) != list(window[:compared]):
        raise UncuttableError
    return number


def _tokens_after(left: str, right: str, ids: Sequence[int], locate: Locate) -> int:
    """Return how many of the `ids` of a text are after the cut that precedes its end `right`.

    From the middle of `left` on, the window around the cut must have the same tokens as the text.
    """
    window, starts = locate(left + right)
    number = sum(start >= len(left) for start in starts)
    compared = sum(start >= len(left) / 2 for start in starts)
    if compared in {0, number} or list(ids[-compared:]) != list(window[-compared:]):
        raise UncuttableError
    return number
