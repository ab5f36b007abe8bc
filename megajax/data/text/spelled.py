"""Special tokens that a text spells, which are read as letters."""

import re
from collections.abc import Collection

MOST_NAMES = 5  # that a warning has


class SpelledTokens:
    """A search for the names of special tokens in texts."""

    def __init__(self, names: Collection[str]) -> None:
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        # a class that is empty matches nothing
        self._pattern = re.compile('|'.join(map(re.escape, longest_first)) or r'[^\s\S]')

    def find(self, text: str) -> set[str]:
        """Return the names that a text spells."""
        return set(self._pattern.findall(text))


def letters_warning(documents: int, names: Collection[str]) -> str:
    """Return a warning for `documents` that spell the special tokens `names`, and the fix."""
    some = ', '.join(sorted(names)[:MOST_NAMES]) + ', ...' * (len(names) > MOST_NAMES)
    subject = '1 document spells' if documents == 1 else f'{documents} documents spell'
    return (
        f'{subject} special tokens ({some}), which are read as letters; if this is a rendered '
        'chat, train on JSON lines with "messages", from which the chat template makes the tokens'
    )
