"""Find special tokens spelled in a text, which are read as text unless a build parses them."""

import logging
import re
from collections.abc import Collection, Iterable

logger = logging.getLogger(__name__)

MOST_NAMES = 5  # maximum number of names in a warning


class SpelledTokens:
    """A search for the names of special tokens in texts."""

    def __init__(self, names: Collection[str]) -> None:
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        # without names: an empty character class, which matches nothing
        self._pattern = re.compile('|'.join(map(re.escape, longest_first)) or r'[^\s\S]')

    def find(self, text: str) -> set[str]:
        """Return the names that a text spells."""
        return set(self._pattern.findall(text))

    def count(self, text: str) -> int:
        """Return the number of special tokens that a text spells."""
        return len(self._pattern.findall(text))


def letters_warning(documents: int, names: Collection[str]) -> str:
    """Return a warning for `documents` that spell the special tokens `names`, and the fix."""
    return (
        f'{_spelling(documents, names)}, which are read as letters; if this is a rendered chat, '
        'give JSON lines with "messages", from which the chat template makes the tokens, or read '
        'what is spelled as tokens with the option --parse-special of megajax data build'
    )


def prompts_warning(texts: Iterable[str], names: Collection[str]) -> str:
    """Return a warning if prompts spell the special tokens `names`; '' if none does."""
    special = SpelledTokens(names)
    spelled = set().union(*map(special.find, texts))
    some = ', '.join(sorted(spelled)[:MOST_NAMES]) + ', ...' * (len(spelled) > MOST_NAMES)
    message = f'prompts spell special tokens ({some}), which are read as letters'
    return f'{message}; if the model has a chat template, use --chat' if spelled else ''


def tokens_note(documents: int, names: Collection[str]) -> str:
    """Return a note that `documents` spell the tokens `names`, which are read as special tokens."""
    return f'{_spelling(documents, names)}, which are read as these tokens'


def _spelling(documents: int, names: Collection[str]) -> str:
    some = ', '.join(sorted(names)[:MOST_NAMES]) + ', ...' * (len(names) > MOST_NAMES)
    subject = '1 document spells' if documents == 1 else f'{documents} documents spell'
    return f'{subject} special tokens ({some})'


def warning_of_texts(place: str, texts: Iterable[str], names: Collection[str]) -> str:
    """Return a warning with the number of texts that spell the special tokens `names`; '' for none.

    `place` names the texts.
    """
    special = SpelledTokens(names)
    spelled = [found for text in texts if (found := special.find(text))]
    return f'{place}: {letters_warning(len(spelled), set().union(*spelled))}' if spelled else ''


def warn_of_letters(place: str, texts: Iterable[str], names: Collection[str]) -> None:
    """Log `warning_of_texts`, if there is one."""
    if said := warning_of_texts(place, texts, names):
        logger.warning(said)
