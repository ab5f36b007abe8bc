"""The command of a shell script that starts Megatron-LM, found without running anything of it.

Variables, arrays and sums that the script itself sets are put in. What only a shell can know stays
as it is written, marked, with its reason: a variable that a branch sets, the output of a command,
an argument of the script. Imports no jax.
"""

import ast
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megajax.config import ConfigError
from megajax.interop.shell import Command, Expansion, Part, Word, commands_of, word_of

MAX_CHARACTERS = 2**20  # of all words, when the variables are put in
MAX_COMMANDS = 100_000
MAX_DEPTH = 20  # of commands within commands, and of defaults within defaults
OPEN, CLOSE = '\ue000', '\ue001'  # around a piece whose value is not known
UNKNOWN = re.compile(f'{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}')
ASSIGNMENT = re.compile(r'[A-Za-z_]\w*=')
BEGIN = {'if': 'fi', 'for': 'done', 'while': 'done', 'until': 'done', 'case': 'esac', '{': '}'}
# Words after which another command begins.
BEFORE_COMMANDS = ('if', 'elif', 'else', 'then', 'while', 'until', 'do', '{', '!')
DECLARE = ('export', 'declare', 'local', 'readonly', 'typeset')
# Commands that name a program without starting it.
PASSIVE = frozenset(
    """
    echo printf cat cp mv rm ls ln cd mkdir touch chmod find source . [ [[ test : grep sed awk head
    tail tee return exit set trap for case wget curl git pip sbatch
    """.split()  # noqa: SIM905
)
# Commands that change the variables they name: those of a sum that it assigns, all of others.
SETTERS = {
    'let': re.compile(
        r'([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)'
    ),
    **dict.fromkeys(
        ('read', 'mapfile', 'readarray', 'getopts', 'unset', 'printf -v'),
        re.compile(r'(?<![\w-])([A-Za-z_]\w*)()'),
    ),
}
PROGRAM = re.compile(r'.*\.py')
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
}
LARGEST, MAX_SUM = 2**53, 1000  # of a number, and of the characters of a sum
WAY_OUT = 'put `echo` before the command, run the script, and give its output'


class Launch(NamedTuple):
    """The words of the command that starts Megatron-LM, in which unknown pieces are marked."""

    words: list[str]
    line: int
    reasons: Mapping[str, str]  # why a piece is unknown


def plain(word: str) -> str:
    """Return a word as it was written, without the marks of what is unknown."""
    return word.replace(OPEN, '').replace(CLOSE, '')


def mark(match: re.Match[str]) -> str:
    """Return what was found, marked as unknown."""
    return f'{OPEN}{match[0]}{CLOSE}'


def program_of(words: Sequence[str]) -> int | None:
    """Return the index of the program among the words of a command, None if there is none."""
    programs = [index for index, word in enumerate(words) if PROGRAM.fullmatch(plain(word))]
    modules = [
        index + 1
        for index, word in enumerate(words[:-1])
        if word in ('-m', '--module') and not words[index + 1].startswith('torch.distributed')
    ]
    found = sorted([*programs, *modules])
    named = [index for index in found if 'pretrain' in words[index].rpartition('/')[2]]
    return next(iter([*named, *found]), None)


def find_launch(text: str, source: str) -> Launch:
    """Return the command of a script that starts Megatron-LM; `source` is its name in messages.

    A text of arguments alone is one, too. Raises ConfigError if there is no such command, or more
    than one.
    """
    script = _Script(source)
    try:
        script.run(commands_of(text, source))
    except RecursionError as error:
        raise ConfigError(f'{source}: is nested too deeply; {WAY_OUT}') from error
    launches = [each for each in script.launches if program_of(each[1]) is not None]
    named = [each for each in launches if 'pretrain' in each[1][program_of(each[1]) or 0]]
    if not launches:  # arguments without a program
        launches = [each for each in script.launches if each[1][0].startswith('-')]
    found = {tuple(words): line for line, words in named or launches}
    if len(found) != 1:
        lines = ' and '.join(str(line) for line in sorted(found.values()))
        what = (
            f'lines {lines} each start a program'
            if found
            else 'no command in it starts pretrain_gpt.py or pretrain_bert.py; if another script '
            'does, give that one'
        )
        raise ConfigError(f'{source}: {what}; or {WAY_OUT}')
    ((words, line),) = found.items()
    size = script.values.get('WORLD_SIZE', [''])
    known = [f'WORLD_SIZE={size[0]}'] if size[0].isdecimal() else []
    return Launch([*known, *sbatch_options(text, words), *words], line, script.reasons)


def sbatch_options(text: str, words: Sequence[str]) -> list[str]:
    """Return the options of a script's #SBATCH lines, which its srun has too."""
    if not any(plain(word).endswith('srun') for word in words):
        return []
    lines = re.findall(r'^#SBATCH\s+([^#\n]*)', text, re.MULTILINE)
    return ['sbatch', *(word for line in lines for word in line.split())]


class _Script:
    """The variables of a script, line by line, and the commands that may start a program."""

    def __init__(self, source: str):
        self.source = source
        self.values: dict[str, list[str]] = {}
        self.reasons: dict[str, str] = {}
        self.launches: list[tuple[int, list[str]]] = []
        self._open: list[tuple[str, int]] = []  # the branches and loops around a command
        self._depth = self._count = 0

    def run(self, commands: Sequence[Command]) -> None:
        """Read commands in their order."""
        for command in commands:
            self._read(command, command.words)

    def _read(self, command: Command, words: Sequence[Word]) -> None:
        self._count += 1
        if self._count > MAX_COMMANDS:
            raise ConfigError(f'{self.source}: has more than {MAX_COMMANDS:,} commands; {WAY_OUT}')
        first = words[0].text if words else None
        if first in BEGIN.values() and self._open and BEGIN[self._open[-1][0]] == first:
            self._open.pop()
        if first in BEGIN or (first == 'function' and words[-1].text == '{'):
            self._open.append(('{' if first == 'function' else first, command.line))
        if first in BEFORE_COMMANDS:
            self._read(command, words[1:])
        elif first == 'for' and len(words) > 1 and words[1].text:
            self._forget(words[1].text, f'`for` in line {command.line} sets it')
        elif words and (first in DECLARE or all(word.name for word in words)):
            for word in words:
                if word.name:
                    self._assign(command, word)
        elif words and first not in (*BEGIN, 'function'):
            self._simple(command, words)

    def _assign(self, command: Command, word: Word) -> None:
        name, value = word.name or '', self._elements(word)
        if self._open or command.is_conditional:
            what, line = self._open[-1] if self._open else ('&&', command.line)
            what = 'a function' if what == '{' else f'`{what}`'
            self._forget(name, f'{what} in line {line} sets it')
        elif not word.adds:
            self.values[name] = value
        elif word.elements is not None:
            self.values.setdefault(name, []).extend(value)
        else:
            self.values[name] = [''.join([*self.values.get(name, []), *value])]

    def _elements(self, word: Word) -> list[str]:
        if word.elements is not None:
            value = [part for element in word.elements for part in self.expand(element.parts)]
        else:
            value = [''.join(self._joined(part) for part in word.parts)]
        self._check_size(value)
        return value

    def _forget(self, name: str, reason: str) -> None:
        self.values.pop(name, None)
        self.reasons[name] = reason

    def _forget_set(self, program: str, text: str, reason: str) -> bool:
        """Forget the variables that a command changes; return whether there are any."""
        names = [a or b for a, b in SETTERS[program].findall(text)]
        for name in names:
            self._forget(name, reason)
        return bool(names)

    def _simple(self, command: Command, words: Sequence[Word]) -> None:
        """Read a command that is neither an assignment nor a part of a branch."""
        expanded = [part for word in words for part in self.expand(word.parts, word.name)]
        program = next((word for word in expanded if not ASSIGNMENT.match(word)), None)
        if program == 'printf' and '-v' in expanded:
            program = 'printf -v'
        if program in SETTERS:
            reason = f'`{program}` in line {command.line} changes it'
            self._forget_set(program, ' '.join(expanded[1:]), reason)
        if program is None or program in PASSIVE or program in SETTERS:
            return
        inner = next(
            (
                index
                for index, word in enumerate(expanded[:-1])
                if word == '-c'
                and index
                and re.fullmatch(r'(.*/)?(ba|z|k)?sh', expanded[index - 1])
            ),
            None,
        )
        if program == 'eval':
            self._run_inner(command, [], ' '.join(map(plain, expanded[1:])))
        elif inner is not None:
            self._run_inner(command, expanded[: inner - 1], plain(expanded[inner + 1]))
        elif program.startswith('-'):
            if self.launches and not command.is_conditional:
                self.launches[-1][1].extend(expanded)  # a line that lacks its backslash
            elif not command.is_conditional:
                self.launches.append((command.line, expanded))
        elif program_of(expanded) is not None:
            self.launches.append((command.line, expanded))

    def _run_inner(self, command: Command, before: list[str], text: str) -> None:
        """Read the text that a command gives to another shell."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f'{self.source}: line {command.line}: shells within shells')
        count = len(self.launches)
        for each in commands_of(text, self.source):
            self._read(each._replace(line=command.line), each.words)
        self.launches[count:] = [(line, before + words) for line, words in self.launches[count:]]
        self._depth -= 1

    def expand(self, parts: Sequence[Part], name: str | None = None) -> list[str]:
        """Return the words that a word becomes: one that is unquoted may be none or several."""
        words: list[str] = [f'{name}='] if name else []
        size = 0
        is_open = bool(words)  # whether the next text belongs to the last word
        for part in parts:
            if isinstance(part, str):
                pieces, splits = [part], False
            else:
                pieces = self._value(part)
                splits = not part.is_quoted
            if splits:
                pieces = [piece for value in pieces for piece in _fields(value)]
            for index, piece in enumerate(pieces):
                if is_open and not index:
                    words[-1] += piece
                else:
                    words.append(piece)
                is_open = True
            size += sum(map(len, pieces))
            if size > MAX_CHARACTERS:
                self._check_size(words)
        return words

    def _joined(self, part: Part) -> str:
        return part if isinstance(part, str) else ' '.join(self._value(part))

    def _value(self, part: Expansion) -> list[str]:
        """Return the values of `$NAME`, `${NAME[@]}`, `${NAME:-default}` or `$((sum))`."""
        text = part.text
        if text.startswith('$(('):
            return self._sum(text)
        if text.startswith(('$(', '`')):
            return [self._unknown(text, 'the output of a command')]
        inner = text[2:-1] if text.startswith('${') else text[1:]
        match = re.fullmatch(r'(\w+|[@*#?$!-])(?:\[([@*])\])?(?:(:?[-=?])(.*))?', inner, re.DOTALL)
        if not match:
            return [self._unknown(text, 'a rewriting of a variable')]
        name, every, default, instead = match.groups()
        values = self.values.get(name)
        if values is not None and (values != [''] or not default):
            return [' '.join(values)] if every == '*' else list(values if every else values[:1])
        if default and default[-1] != '?' and name not in self.reasons:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ConfigError(f'{self.source}: {text:.80}: too many defaults in one another')
            values = [''.join(self._joined(piece) for piece in word_of(instead, self.source))]
            self._depth -= 1
            if '=' in default:
                self.values[name] = values
            return values
        is_argument = not re.match('[A-Za-z_]', name)
        why = 'an argument of the script' if is_argument else 'the text does not set it'
        return [self._unknown(text, self.reasons.get(name, why))]

    def _sum(self, text: str) -> list[str]:
        if len(text) > MAX_SUM:
            return [self._unknown(text, 'a long sum')]
        if self._forget_set('let', text, f'`{plain(text)}` changes it'):
            return [self._unknown(text, 'a sum that changes a variable')]
        inner = re.sub(
            r'\$?\{?\b([A-Za-z_]\w*)\b\}?', lambda match: self._number(match[1]), text[3:-2]
        )
        try:
            return [str(_number(ast.parse(inner.strip(), mode='eval').body))]
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return [self._unknown(text, 'a sum of numbers that the text does not have')]

    def _number(self, name: str) -> str:
        return f'({"".join(self.values.get(name, ["?"]))})'

    def _unknown(self, text: str, reason: str) -> str:
        text = plain(text)
        self.reasons[text] = reason
        return f'{OPEN}{text}{CLOSE}'

    def _check_size(self, words: Sequence[str]) -> None:
        if sum(map(len, words)) > MAX_CHARACTERS:
            raise ConfigError(
                f'{self.source}: its variables make more than {MAX_CHARACTERS:,} characters'
            )


def _fields(value: str) -> list[str]:
    """Split a value at its blanks, but not within what is unknown."""
    return re.findall(rf'(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^\s{OPEN}])+', value)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        number = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = -_number(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        number = OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    else:
        raise ValueError
    if abs(number) > LARGEST:
        raise ValueError
    return number
