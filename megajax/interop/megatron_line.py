"""Reading a command line of Megatron-LM: its launcher, its program and its arguments.

Imports no jax.
"""

import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from megajax.config import ConfigError
from megajax.interop.arguments import ONLY
from megajax.interop.megatron_script import split_script
from megajax.interop.megatron_table import (
    INSTEAD,
    NO_MEANING,
    READ,
    RENAMED,
    SETS,
    known_names,
    names,
)

TYPES = {name: kind for kind, block in READ.items() for name in names(block)}
REASONS = {name: reason for reason, block in NO_MEANING.items() for name in names(block)}
KNOWN = sorted({*known_names(), *ONLY})
PROCESSES = ('nproc_per_node', 'ntasks_per_node')  # of torchrun and srun
NODES = ('nnodes', 'nodes')
MAX_TEXT_CHARACTERS = 2**20


class Line(NamedTuple):
    """The contents of a command line of Megatron-LM."""

    program: str  # pretrain_gpt.py, or the name of another one
    world_size: int | None  # number of GPUs, if the launcher or its environment says it
    arguments: Mapping[str, Any]  # by Megatron-LM's names, those that were given
    spelled: Mapping[str, str]  # each as it was written, with its value
    unused: Mapping[str, list[str]]  # those without a meaning here, as written, by the reason
    problems: tuple[str, ...]  # of those that are unknown or not supported

    @property
    def is_bert(self) -> bool:
        """Whether it pre-trains BERT."""
        return 'bert' in self.program

    def get(self, name: str) -> Any:
        """Return the value of an argument, None if it was not given."""
        return self.arguments.get(name)


def read_line(words: Sequence[str], *, world_size: int | None = None) -> Line:
    """Read the words of a command line, as a shell has split them.

    `@FILE` and `-` stand for the text of a file or of standard input. Raises ConfigError if there
    is none.
    """
    words = [part for word in words for part in _expanded(word)]
    programs = [index for index, word in enumerate(words) if word.endswith('.py')]
    start = programs[0] + 1 if programs else 0
    launcher = {name: values for name, values, _ in _arguments(words[:start])}
    arguments: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unused: dict[str, list[str]] = {}
    problems = []
    for name, values, written in _arguments(words[start:]):
        name = RENAMED.get(name, name)
        shown = shlex.join([written, *values]) if written.startswith('-') else written
        if name in REASONS:
            unused.setdefault(REASONS[name], []).append(shown)
            continue
        try:
            value = _value(name, values, shown)
        except ConfigError as error:
            problems.append(str(error))
        else:
            key, arguments[name] = SETS.get(name, (name, value)) if value else (name, value)
            arguments[key], spelled[key] = arguments[name], shown
    return Line(
        Path(words[start - 1]).name if programs else 'pretrain_gpt.py',
        world_size or _world_size(launcher, words[:start]),
        arguments,
        spelled,
        unused,
        tuple(problems),
    )


def _expanded(word: str) -> list[str]:
    """Return the words of the text that `@FILE` or `-` stands for, or the word itself."""
    if word == '-':
        return split_script(sys.stdin.read(MAX_TEXT_CHARACTERS), 'standard input')
    if not word.startswith('@'):
        return [word]
    path = Path(word[1:])
    try:
        with path.open(encoding='utf-8') as file:
            return split_script(file.read(MAX_TEXT_CHARACTERS), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{path}: cannot be read as text: {error}') from error


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield name, values and spelling of each argument; NeMo's `group.name=value` is one too."""
    current: tuple[str, list[str], str] | None = None
    for word in words:
        option = re.fullmatch(r'--?([A-Za-z][\w.-]*)(?:=(.*))?', word, re.DOTALL)
        override = re.fullmatch(r'\+{0,2}(?:[A-Za-z]\w*\.)+(\w+)=(.*)', word, re.DOTALL)
        if option or override:
            if current:
                yield current
            name, value = (option or override).groups()  # type: ignore[union-attr]
            written = word if override else word.partition('=')[0]
            current = name.replace('-', '_'), [] if value is None else [value], written
        elif current:
            current[1].append(word)
    if current:
        yield current


def _value(name: str, values: list[str], shown: str) -> Any:
    """Return the value of an argument. Raises ConfigError if it is unknown or not supported."""
    if name in INSTEAD:
        raise ConfigError(f'{shown}: is not supported: {INSTEAD[name]}')
    if name not in TYPES and name not in SETS and name not in ONLY:
        near = get_close_matches(name, KNOWN, n=1)
        hint = f'; did you mean --{near[0].replace("_", "-")}?' if near else ''
        raise ConfigError(
            f'{shown}: is no argument of pretrain_gpt.py and pretrain_bert.py that is known{hint}'
        )
    if any('$' in value for value in values):
        raise ConfigError(
            f'{shown}: holds a variable whose value is not in the text: put `echo` before the '
            'command in the script, and give what it prints'
        )
    kind = TYPES.get(name, bool)
    if kind is list:
        return values
    if kind is bool and not values:
        return True
    if name in ONLY and name not in TYPES:
        return {'false': False, 'none': None, 'null': None}.get(
            ' '.join(values).lower(), ' '.join(values)
        )
    parse = PARSERS[kind]
    try:
        if len(values) != 1 and not (name == 'split' and values):
            raise ValueError
        return parse(' '.join(values))
    except ValueError:
        raise ConfigError(f'{shown}: expected {WORDS[kind]}') from None


def _boolean(text: str) -> bool:
    if text.lower() not in ('true', 'false', '1', '0'):
        raise ValueError
    return text.lower() in ('true', '1')


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


PARSERS: Mapping[type, Callable[[str], Any]] = {
    int: int,
    float: _number,
    str: str,
    bool: _boolean,
}
WORDS = {int: 'a whole number', float: 'a number', str: 'a word', bool: 'no value'}


def _world_size(launcher: Mapping[str, list[str]], words: Sequence[str]) -> int | None:
    """Return the number of processes that a launcher starts, one for each GPU."""
    for word in words:
        if match := re.fullmatch(r'WORLD_SIZE=(\d+)', word):
            return int(match[1])

    def number(options: Sequence[str]) -> int | None:
        text = next((values[0] for name in options if (values := launcher.get(name))), '')
        return int(text.rpartition(':')[2]) if re.fullmatch(r'(\d+:)?\d{1,9}', text) else None

    if (processes := number(PROCESSES)) is not None:
        return processes * (number(NODES) or 1)
    return number(('ntasks',))
