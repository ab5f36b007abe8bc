"""Cuts in a long text, at which a tokenizer finds the tokens that it finds in the whole text.

The library tokenizers holds over 100 bytes for each byte of a text that it reads. Most tokenizers
split a text into words first, and merge only within them, so a cut between two words changes
nothing. Whether that holds for a tokenizer and a place is seen by reading both sides of the cut
alone and together.
"""

import re
from collections.abc import Callable, Iterator, Sequence

PART = 1 << 20  # characters that are read at a time
WHOLE = 1 << 24  # characters that are read at a time where a tokenizer allows no cut
AROUND = 256  # characters on each side of a cut that are read to try it
TRIES = 16  # cuts that are tried for the end of a part
# Where a cut may be, by preference: between lines that are neither blank nor indented, before a
# line that is not, before a word.
CUTS = re.compile(r'(?<=\S\n)(?=\S)'), re.compile(r'(?<=\n)(?=\S)'), re.compile(r'(?<=\w)(?= \w)')

Encode = Callable[[str], Sequence[int]]


class UncuttableError(ValueError):
    """A text is longer than WHOLE, and the tokenizer allows no cut in it."""


def parts(text: str, encode: Encode) -> Iterator[str]:
    """Yield consecutive parts of a text whose ids together are those of the text.

    `encode` returns the ids of a text. Parts have up to PART characters, or up to WHOLE where no
    cut is found. Raises UncuttableError for a text that would have a longer one.
    """
    for part in _cut(text, lambda cut: _is_free(text, cut, encode)):
        if len(part) > WHOLE:
            raise UncuttableError
        yield part


def parts_to_learn(text: str) -> Iterator[str]:
    """Yield parts of up to PART characters, or a longer one, that have the words of the text."""
    return _cut(text, lambda _: True)


def _cut(text: str, is_free: Callable[[int], bool]) -> Iterator[str]:
    start = 0
    while len(text) - start > PART:
        end = next(filter(is_free, _candidates(text, start)), len(text))
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _candidates(text: str, start: int) -> Iterator[int]:
    """Yield places for a cut in the second half of a part, the last of each kind first.

    Where there is none, longer parts follow, up to WHOLE.
    """
    size = PART
    while size <= WHOLE and start + size // 2 < len(text):
        for pattern in CUTS:
            found = [cut.start() for cut in pattern.finditer(text, start + size // 2, start + size)]
            yield from reversed(found[-TRIES:])
        size *= 2


def _is_free(text: str, cut: int, encode: Encode) -> bool:
    before, after = text[cut - AROUND : cut], text[cut : cut + AROUND]
    return [*encode(before), *encode(after)] == [*encode(before + after)]
