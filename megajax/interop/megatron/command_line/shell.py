"""Split the commands of a shell script into words, without running or expanding anything.

Quotes, comments, arrays, here-documents, redirections and line continuations are read as bash reads
them. Imports no jax.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from megajax.core.config import ConfigError


class Expansion(NamedTuple):
    """`$NAME`, `${...}`, `$(...)`, `$((...))` or a command in backticks, as written."""

    text: str
    is_quoted: bool


Part = str | Expansion


class Word(NamedTuple):
    """A word of a command; for an assignment, its name and its value."""

    parts: tuple[Part, ...]
    name: str | None = None  # name of a variable that is assigned
    adds: bool = False  # whether the assignment appends: NAME+=
    elements: 'tuple[Word, ...] | None' = None  # elements of an array
    is_quoted: bool = False

    @property
    def text(self) -> str | None:
        """The word, if no part of it is quoted or needs expansion."""
        is_plain = not self.is_quoted and self.name is None and len(self.parts) == 1
        return self.parts[0] if is_plain and isinstance(self.parts[0], str) else None


class Command(NamedTuple):
    """A simple command, or the part of a compound one between two separators."""

    words: tuple[Word, ...]
    line: int
    before: str = ''  # the separator before it
    after: str = ''

    @property
    def is_conditional(self) -> bool:
        """Whether the result of a different command decides whether this one runs."""
        return self.before in ('&&', '||')

    @property
    def is_apart(self) -> bool:
        """Whether the command runs in a separate process, which discards its variables."""
        return self.before in ('|', '|&') or self.after in ('|', '|&', '&')


ASSIGNED = re.compile(r'([A-Za-z_]\w*)(\+?)=')
REDIRECTION = re.compile(r'\d*(?:&>>?|[<>]&[\d-]?|>>|>\||<<<|<>|[<>](?!\())')
HERE = re.compile(r'\d*<<(-?)\s*(["\']?)(\w+)\2')
SEPARATOR = re.compile(r'&&|\|\||\|&|;;&?|&(?!>)|[;|()\n]')
PLACEHOLDER = re.compile(r'<[A-Za-z][^<>|;&\n]*>')  # a placeholder that the user should replace
NAME = re.compile(r'\$(?:\w+|[@*#?$!-])')
PLAIN = re.compile(r'[^\s\\\'"$`;&|()<>#]+|#')
# Words after which an opening bracket may follow.
BEFORE_SUBSHELL = {'if', 'then', 'else', 'elif', 'while', 'until', 'do', '{', '!', '(', ')'}
# `([0]*3+[1]*58)` on one line, which `echo` prints without its quotes.
BRACKETS = re.compile(r'\((?:[^()\n]|\([^()\n]*\))*\)')
CLOSING = {'(': ')', '{': '}'}


def commands_of(text: str, source: str) -> list[Command]:
    """Return the commands of a text; `source` names it in messages.

    Raises ConfigError for a quote or a bracket that is not closed.
    """
    try:
        return list(_Scanner(text).commands())
    except _OpenError as error:
        raise ConfigError(
            f'{source}: is not the text of a command: {error.args[0]} is not closed'
        ) from error


def word_of(text: str, source: str) -> tuple[Part, ...]:
    """Return the parts of a text that is a single word, such as the default of a variable."""
    scanner = _Scanner(text)
    parts: list[Part] = []
    try:
        while scanner.at < len(text):
            piece, _ = scanner.piece()
            parts += piece or [scanner.take(1)]
    except _OpenError as error:
        raise ConfigError(f'{source}: {text:.80}: {error.args[0]} is not closed') from error
    return tuple(parts)


class _OpenError(Exception):
    """A quote or a bracket that is not closed."""


class _Scanner:
    def __init__(self, text: str):
        self.text, self.at = text, 0
        self._here: list[tuple[str, bool]] = []  # here-documents that begin on the next line

    def take(self, count: int) -> str:
        """Return the next characters, and continue after them."""
        self.at += count
        return self.text[self.at - count : self.at]

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()
        return match

    def commands(self) -> Iterator[Command]:
        """Yield the commands that are not empty; brackets of a subshell are words of their own.

        `f() {` begins with the words `function f {`.
        """
        words: list[Word] = []
        line, counted, before = 1, 0, ''
        while self.at < len(self.text):
            self._skip_blanks()
            line += self.text.count('\n', counted, self.at)
            counted, separator = self.at, None
            if not words and self.text.startswith('((', self.at):
                words = [Word(('let',)), Word((self._balanced('(')[2:-2],), is_quoted=True)]
            while self.at < len(self.text) and separator is None:
                separator = self._match(SEPARATOR)
                if separator is None:
                    if word := self._word():
                        words.append(word)
                    self._skip_blanks()
                elif self._is_joined(words, separator[0]):
                    separator = None
            after = separator[0] if separator else ''
            if words:
                yield Command(tuple(words), line, before, after)
            if words or after != '\n':  # a line may end after && or |
                before = after
            words = [Word((after,))] if after == ')' else []
            if after == '\n':
                self._skip_here()
        if words:
            yield Command(tuple(words), line, before)

    def _is_joined(self, words: list[Word], separator: str) -> bool:
        """Return whether a separator is a part of the command with these words; if so, add it."""
        texts = [word.text for word in words]
        if '[[' in texts and ']]' not in texts:
            words.append(Word((separator,), is_quoted=True))
            return True
        is_function = texts[-2:-1] == ['function']
        if separator == '\n':
            return is_function
        if separator != '(':
            return False
        is_first = all(text in BEFORE_SUBSHELL for text in texts)
        last = (texts[-1] if texts else None) or ''
        is_name = set(texts[-2:-1]) <= BEFORE_SUBSHELL and not last.startswith('-')
        if not (is_first or is_function or is_name):
            return last != 'in' and self._add_brackets(words)
        if not is_first and self._match(re.compile(r'\s*\)\s*')):
            words[-1:] = words[-1:] if is_function else [Word(('function',)), words[-1]]
            return True
        if is_first or is_function:
            words.append(Word(('(',)))
        return is_first or is_function

    def _add_brackets(self, words: list[Word]) -> bool:
        """Add a text in brackets that bash would reject; return whether it ends on its line."""
        start = self.at - 1
        if match := BRACKETS.match(self.text, start):
            self.at = match.end()
            rest, _ = self._parts()
            if self.text[start - 1] in ' \t\n':
                words.append(Word((match[0], *rest), is_quoted=True))
            else:
                parts = (*words[-1].parts, match[0], *rest)
                words[-1] = words[-1]._replace(parts=parts, is_quoted=True)
        return bool(match)

    def _skip_blanks(self) -> None:
        self._match(re.compile(r'(?:[ \t\r]|\\\r?\n)+'))
        if self.text.startswith('#', self.at):
            self._match(re.compile(r'[^\n]*'))

    def _skip_here(self) -> None:
        for end, is_indented in self._here:
            indent = r'\t*' if is_indented else ''
            closing = re.compile(rf'^{indent}{end}$', re.MULTILINE).search(self.text, self.at)
            self.at = closing.end() if closing else len(self.text)
        self._here = []

    def _word(self) -> Word | None:
        """Return the next word; None for a redirection, whose file is skipped."""
        if not self.text.startswith('<<<', self.at) and (here := self._match(HERE)):
            self._here.append((here[3], bool(here[1])))
            return None
        if not PLACEHOLDER.match(self.text, self.at) and (redirection := self._match(REDIRECTION)):
            if not redirection[0].endswith(('&', '-')) and not redirection[0][-1].isdecimal():
                self._skip_blanks()
                self._word()
            return None
        if assigned := self._match(ASSIGNED):
            name, adds = assigned[1], bool(assigned[2])
            if self.text.startswith('(', self.at):
                return Word((), name, adds, tuple(self._elements()))
            return Word(*self._parts()[:1], name, adds)
        parts, is_quoted = self._parts()
        return Word(parts, is_quoted=is_quoted)

    def _elements(self) -> Iterator[Word]:
        self.at += 1
        while True:
            self._match(re.compile(r'\s+'))
            self._skip_blanks()
            if self.at >= len(self.text):
                raise _OpenError('(')
            if self._match(re.compile(r'\)')):
                return
            if self.text[self.at] not in '\n \t':
                parts, is_quoted = self._parts()
                yield Word(parts or (self.take(1),), is_quoted=is_quoted)

    def _parts(self) -> tuple[tuple[Part, ...], bool]:
        """Return the parts of a word, and whether some of it is quoted."""
        parts: list[Part] = []
        is_quoted = False
        while self.at < len(self.text):
            found, quoted = self.piece()
            if found is None:
                if self.text.startswith(('<(', '>('), self.at):
                    self.at += 1
                    found = [Expansion('$' + self._balanced('('), True)]
                else:
                    break
            is_quoted |= quoted
            for part in found:
                if isinstance(part, str) and parts and isinstance(parts[-1], str):
                    parts[-1] += part
                else:
                    parts.append(part)
        return tuple(parts), is_quoted

    def piece(self) -> tuple[list[Part] | None, bool]:
        """Return the next parts of a word, and whether they are quoted; None at the word's end."""
        letter = self.text[self.at]
        if letter == '\\':
            return [self.take(2)[1:].replace('\n', '')], True
        if letter == "'":
            end = self._find("'", self.at + 1)
            return [self.take(end + 1 - self.at)[1:-1]], True
        if letter == '"':
            return self._double(), True
        if letter in '$`':
            return [self._expansion(is_quoted=False)], False
        if placeholder := self._match(PLACEHOLDER):
            return [placeholder[0]], True
        if plain := self._match(PLAIN):
            return [plain[0]], False
        return None, False

    def _double(self) -> list[Part]:
        parts: list[Part] = ['']
        self.at += 1
        while not self.text.startswith('"', self.at):
            if self.at >= len(self.text):
                raise _OpenError('"')
            letter = self.text[self.at]
            if letter == '\\':
                pair = self.take(2)
                parts.append({'\n': ''}.get(pair[1:], pair[pair[1:] in '$`"\\' :]))
            elif letter in '$`':
                parts.append(self._expansion(is_quoted=True))
            else:
                parts.append(self._match(re.compile(r'[^"\\$`]+'))[0])  # type: ignore[index]
        self.at += 1
        return parts

    def _expansion(self, *, is_quoted: bool) -> Part:
        if self.text[self.at] == '`':
            return Expansion(self.take(self._find('`', self.at + 1) + 1 - self.at), is_quoted)
        if self.text[self.at + 1 : self.at + 2] in ('(', '{'):
            self.at += 1
            return Expansion('$' + self._balanced(self.text[self.at]), is_quoted)
        name = self._match(NAME)
        return Expansion(name[0], is_quoted) if name else self.take(1)

    def _balanced(self, opening: str) -> str:
        """Return the text up to the bracket that closes the current one."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in '\'"' and not (letter == "'" and opening == '{'):
                self.piece()
                continue
            self.at += 2 if letter == '\\' else 1
            depth += {opening: 1, CLOSING[opening]: -1}.get(letter, 0)
            if not depth:
                return self.text[start : self.at]
        raise _OpenError(opening)

    def _find(self, quote: str, start: int) -> int:
        if (end := self.text.find(quote, start)) < 0:
            raise _OpenError(quote)
        return end
