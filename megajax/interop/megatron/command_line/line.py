"""Read a Megatron-LM command line: its launcher, its program and its arguments.

Imports no jax.
"""

import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from megajax.core.config import ConfigError
from megajax.interop.megatron.command_line.arguments import ONLY
from megajax.interop.megatron.command_line.muon import KINDS
from megajax.interop.megatron.command_line.script import find_launch, program_of
from megajax.interop.megatron.command_line.table import (
    DEFAULTS,
    NO_MEANING,
    READ,
    RENAMED,
    SETS,
    UNREAD,
    known_names,
    names,
)
from megajax.interop.megatron.command_line.unsupported import INSTEAD
from megajax.interop.shell_variables import UNKNOWN, mark, plain

TYPES = {name: kind for kind, block in READ.items() for name in names(block)}
REASONS = {name: reason for reason, block in NO_MEANING.items() for name in names(block)}
KNOWN = sorted({*known_names(), *ONLY})
# Arguments of torchrun, deepspeed and srun.
PROCESSES = ('nproc_per_node', 'num_gpus')
NODES = ('nnodes', 'num_nodes', 'nodes')
SHORT = {'N': 'nodes', 'n': 'ntasks'}  # short options of Slurm's programs
# Slurm's programs, and programs between them and the training that have such options too.
SLURM, NOT_SLURM = ('srun', 'sbatch'), ('nice', 'ionice', 'numactl', 'taskset')
MAX_TEXT_CHARACTERS = 2**20
VARIABLE = re.compile(r'\$\{[^}]*\}|\$\w+')
PLACEHOLDER = re.compile(r'<\w[^>]*>?')
# Arguments that become only a comment, and arguments with a value that megajax ignores.
COMMENTED = ('load', 'vocab_file')
TAKES_VALUE = re.compile(r'(dir|path|file|name|project|entity|rank|addr|port|workers|interval)$')


class Line(NamedTuple):
    """The contents of a Megatron-LM command line."""

    program: str  # pretrain_gpt.py, or the name of a different program
    world_size: int | None  # number of GPUs, if the launcher or its environment sets it
    arguments: Mapping[str, Any]  # the arguments that were given, by Megatron-LM's names
    spelled: Mapping[str, str]  # each argument as it was written, with its value
    unused: Mapping[str, list[str]]  # arguments that megajax ignores, as written, by the reason
    problems: tuple[str, ...]  # problems with arguments that are unknown or not supported
    faulty: frozenset[str]  # names of arguments whose value could not be read
    place: str  # line of the script with the command, if a part of the command is unknown
    joined: str  # first line of the script that bash does not pass to the command, if any

    @property
    def is_bert(self) -> bool:
        """Whether the command pretrains BERT."""
        return 'bert' in self.program

    def option(self, name: str) -> str:
        """Return an argument as it was written, without its value."""
        written = self.spelled.get(name, f'--{name.replace("_", "-")}')
        return re.split('[ =]', written, maxsplit=1)[0]

    def get(self, name: str) -> Any:
        """Return the value of an argument; None if it was not given."""
        return self.arguments.get(name)

    def default(self, name: str) -> Any:
        """Return the value of an argument, or Megatron-LM's default."""
        return self.arguments.get(name, DEFAULTS[name])


def read_line(words: Sequence[str], *, world_size: int | None = None) -> Line:
    """Read the words of a command line, as a shell has split them.

    `@FILE` and `-` are replaced by the text of a file or of standard input. Raises ConfigError if
    there is no command line.
    """
    words, reasons, place, joined = _expanded(words)
    program = program_of(words)
    start = 0 if program is None else program + 1
    launcher = {name: values for name, values, _ in _arguments(list(_without_short(words[:start])))}
    arguments: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    unused: dict[str, list[str]] = {}
    problems: list[str] = []
    faulty: set[str] = set()
    leading = list(takewhile(lambda word: _option(word) is None, words[start:]))
    for name, values, written in _arguments(words[start:]):
        name = RENAMED.get(name, name)
        shown = shlex.join(map(plain, [written, *values])) if written.startswith('-') else written
        problems += _unknown(name, values, shown, reasons)
        faulty.add(name)
        if name in REASONS:
            unused.setdefault(REASONS[name], []).append(shown)
            continue
        try:
            value = _value(name, [plain(value) for value in values], shown)
        except ConfigError as error:
            if not any(UNKNOWN.search(value) for value in values) or not _is_known(name):
                problems.append(str(error))
        else:
            key, value = SETS.get(name, (name, value)) if value else (name, value)
            arguments[key], spelled[key] = value, shown
            faulty.discard(name)
    is_read = {
        'moe_': arguments.get('num_experts'),
        'muon_': arguments.get('optimizer') in KINDS,
        'fp8_amax_': arguments.get('fp8_format') and arguments.get('fp8_recipe') != 'tensorwise',
    }
    unread = tuple(start for start, reads in is_read.items() if not reads)
    for name in [name for name in arguments if name.startswith(unread)]:
        unused.setdefault(UNREAD, []).append(spelled[name])
        del arguments[name]
    problems += [
        f'{piece}: its value is not in the text: {reasons.get(piece, "it is a variable")}'
        for word in leading
        for piece in UNKNOWN.findall(word)
    ]
    is_unknown = any('is not in the text' in problem for problem in problems)
    return Line(
        _name(words, program),
        world_size or _world_size(launcher, words[:start]),
        arguments,
        spelled,
        unused,
        tuple(problems),
        frozenset(faulty),
        place if is_unknown else '',
        joined if program is not None else '',
    )


def _name(words: Sequence[str], program: int | None) -> str:
    if program is None:
        return 'pretrain_gpt.py'
    name = Path(plain(words[program])).name
    return name if name.endswith('.py') else f'{name}.py'


def _expanded(words: Sequence[str]) -> tuple[list[str], Mapping[str, str], str, str]:
    """Replace `@FILE` and `-` by the words of that text; return the words and unknown pieces.

    The last results are the line of the script that has the command, and the first line whose
    arguments bash does not pass to it; empty if there is none.
    """
    found: list[str] = []
    reasons: dict[str, str] = {}
    place = joined = ''
    for word in words:
        if word != '-' and not word.startswith('@'):
            found.append(VARIABLE.sub(mark, word))
            continue
        source = 'standard input' if word == '-' else word[1:]
        launch = find_launch(_text(word), source)
        found += launch.words
        reasons |= launch.reasons
        place = f'{source}:{launch.line}'
        joined = f'{source}:{launch.joined}' if launch.joined else ''
    return found, reasons, place, joined


def _text(word: str) -> str:
    source = 'standard input' if word == '-' else word[1:]
    try:
        if word == '-':
            return sys.stdin.read(MAX_TEXT_CHARACTERS)
        with Path(source).open(encoding='utf-8') as file:
            return file.read(MAX_TEXT_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{source}: cannot be read as text: {error}') from error


def _is_known(name: str) -> bool:
    return name in TYPES or name in SETS or name in ONLY


def _unknown(
    name: str, values: Sequence[str], shown: str, reasons: Mapping[str, str]
) -> Iterator[str]:
    """Yield a problem for each unknown piece of an argument's values, which may be arguments."""
    takes_one = TYPES.get(name) not in (None, bool) or TAKES_VALUE.search(name)
    for index, value in enumerate(values):
        is_own = takes_one and (not index or TYPES.get(name) is list)
        if is_own and (name in REASONS or name in COMMENTED):
            continue
        for piece in UNKNOWN.findall(value):
            what = f'{shown}: the value of {piece}' if is_own else f'{piece}: its value'
            yield f'{what} is not in the text: {reasons.get(piece, "it is a variable")}'


def _arguments(words: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each argument's name, values and spelling, including NeMo's `group.name=value`."""
    current: tuple[str, list[str], str] | None = None
    for word in words:
        if option := _option(word):
            if current:
                yield current
            name, value = option.groups()
            written = word.partition('=')[0] if word.startswith('-') else word
            current = name.replace('-', '_'), [] if value is None else [value], written
        elif current:
            current[1].append(word)
    if current:
        yield current


def _option(word: str) -> re.Match[str] | None:
    """Return the name and the value of `--name`, `--name=value` or `group.name=value`."""
    return re.fullmatch(r'--?([A-Za-z][\w.-]*)(?:=(.*))?', word, re.DOTALL) or re.fullmatch(
        r'\+{0,2}(?:[A-Za-z]\w*\.)+(\w+)=(.*)', word, re.DOTALL
    )


def _value(name: str, values: list[str], shown: str) -> Any:
    """Return the value of an argument. Raises ConfigError if it is unknown or not supported."""
    if name in INSTEAD:
        raise ConfigError(f'{shown}: is not supported: {INSTEAD[name]}')
    if not _is_known(name):
        near = get_close_matches(name, KNOWN, n=1)
        # A name with further words is rather another argument than a misspelled one.
        near = [other for other in near if f'_{other}_' not in f'_{name}_']
        hint = f'; did you mean --{near[0].replace("_", "-")}?' if near else ''
        raise ConfigError(
            f'{shown}: is not a known argument of pretrain_gpt.py or pretrain_bert.py{hint}'
        )
    if any(PLACEHOLDER.search(value) for value in values):
        raise ConfigError(f'{shown}: is a placeholder: put a value there')
    kind = TYPES.get(name, bool)
    if kind is list:
        return values
    if kind is bool and not values:
        return True
    if name in ONLY and name not in TYPES:
        return _literal(' '.join(values))
    parse = PARSERS[kind]
    try:
        if len(values) != 1 and not (name == 'split' and values):
            raise ValueError
        return parse(' '.join(values))
    except ValueError:
        raise ConfigError(f'{shown}: expected {WORDS[kind]}') from None


def _literal(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return {'false': False, 'none': None, 'null': None}.get(text.lower(), text)


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


def _without_short(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a launcher with Slurm's `-N 4` and `-n32` under their long names."""
    is_slurm = False
    for word in words:
        program = word.rpartition('/')[2]
        is_slurm = program in SLURM or (is_slurm and program not in NOT_SLURM)
        short = re.fullmatch(r'-([Nn])(\d\S*)?', word) if is_slurm else None
        value = f'={short[2]}' if short and short[2] else ''
        yield f'--{SHORT[short[1]]}{value}' if short else word


def _world_size(launcher: Mapping[str, list[str]], words: Sequence[str]) -> int | None:
    """Return the number of processes that a launcher starts, one for each GPU."""
    is_own = any(name in launcher for name in PROCESSES)  # such launchers set WORLD_SIZE themselves
    for word in words:
        if not is_own and (match := re.fullmatch(r'WORLD_SIZE=(\d+)', word)):
            return int(match[1])

    def number(options: Sequence[str], default: int | None = None) -> int | None:
        given = [values[0] for name in options if (values := launcher.get(name))]
        texts = [text for text in given if re.fullmatch(r'(\d+:)?\d{1,9}', text)]
        return int(texts[0].rpartition(':')[2]) if texts else None if given else default

    # Slurm divides the tasks over nodes that the options need not name.
    if not is_own and (tasks := number(('ntasks',))):
        return tasks
    processes, nodes = number((*PROCESSES, 'ntasks_per_node')), number(NODES, 1)
    return None if processes is None or nodes is None else processes * nodes
