"""Find the command in a shell script that starts Megatron-LM, without running the script.

Variables, arrays and sums that the script itself sets are expanded, in the scope that bash gives
them: a function is read where it is called. Values that only a running shell knows stay as written,
and are marked as unknown with the reason: a variable that a branch sets, the output of a command,
an argument of the script. Imports no jax.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megajax.core.config import ConfigError
from megajax.interop.megatron.command_line.shell import Command, Word, commands_of
from megajax.interop.shell_variables import (
    ARGUMENTS,
    ENVIRONMENT,
    ENVIRONMENT_FILE,
    MAX_DEPTH,
    SETTERS,
    UNKNOWN,
    State,
    Variables,
    plain,
)

MAX_COMMANDS = 100_000
ASSIGNMENT = re.compile(r'[A-Za-z_]\w*=')
BEGIN = {'if': 'fi', 'for': 'done', 'while': 'done', 'until': 'done', 'case': 'esac'}
BEGIN |= {'{': '}', '(': ')'}
# Words after which a new command begins.
BEFORE_COMMANDS = ('if', 'elif', 'else', 'then', 'while', 'until', 'do', '{', '(', ')', '!')
DECLARE = ('export', 'declare', 'local', 'readonly', 'typeset')
# Commands that name a program without starting it.
PASSIVE = frozenset(
    """
    echo printf cat cp mv rm ls ln cd mkdir touch chmod find source . [ [[ test : grep sed awk head
    tail tee return exit set trap for case wget curl git pip sbatch
    """.split()  # noqa: SIM905
)
PROGRAM = re.compile(r'.*\.py')
WAY_OUT = 'put `echo` before the command, run the script, and give its output'


class Launch(NamedTuple):
    """The words of the command that starts Megatron-LM, in which unknown pieces are marked."""

    words: list[str]
    line: int
    reasons: Mapping[str, str] = MappingProxyType({})  # why a piece is unknown
    joined: int = 0  # first line whose arguments bash does not pass to the command; 0 if none


def program_of(words: Sequence[str]) -> int | None:
    """Return the index of the program among the words of a command; None if there is none."""
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

    A text that consists only of arguments also counts as a command. Raises ConfigError if there is
    no such command, or more than one.
    """
    script = _Script(source)
    try:
        script.run(commands_of(text, source))
    except RecursionError as error:
        raise ConfigError(f'{source}: is nested too deeply; {WAY_OUT}') from error
    for name in [] if script.launches else [*script.functions]:
        script.call(name, Command((), 0), None)
    launches = [each for each in script.launches if program_of(each.words) is not None]
    named = [each for each in launches if 'pretrain' in each.words[program_of(each.words) or 0]]
    if not launches:  # arguments without a program
        launches = [each for each in script.launches if each.words[0].startswith('-')]
    found = {tuple(each.words): each for each in named or launches}
    if len(found) != 1:
        lines = sorted({each.line for each in found.values()})
        what = (
            f'lines {" and ".join(map(str, lines))} each start a program'
            if len(lines) > 1
            else f'line {lines[0]} starts a program with different arguments'
            if found
            else 'no command in it starts pretrain_gpt.py or pretrain_bert.py; if another script '
            'does, give that one'
        )
        raise ConfigError(f'{source}: {what}; or {WAY_OUT}')
    ((_, launch),) = found.items()
    words = launch.words
    size = script.values.get('WORLD_SIZE', [''])
    known = [f'WORLD_SIZE={size[0]}'] if size[0].isdecimal() else []
    words = [*known, *sbatch_options(text, words), *words]
    return launch._replace(words=words, reasons=script.reasons)


def sbatch_options(text: str, words: Sequence[str]) -> list[str]:
    """Return the options in a script's #SBATCH lines, which also apply to its srun."""
    if not any(plain(word).endswith('srun') for word in words):
        return []
    lines = re.findall(r'^#SBATCH\s+([^#\n]*)', text, re.MULTILINE)
    return ['sbatch', *(word for line in lines for word in line.split())]


class _Frame(NamedTuple):
    """A branch, a loop, a group or a subshell around a command, or the body of a function."""

    word: str
    line: int
    is_branch: bool
    is_apart: bool  # whether its variables are lost at its end
    state: State  # variables at its beginning
    function: str = ''


class _Script(Variables):
    """The variables of a script at each line, and the commands that may start a program."""

    def __init__(self, source: str):
        super().__init__(source)
        self.launches: list[Launch] = []
        self.functions: dict[str, list[Command]] = {}
        self.called: list[str] = []
        self._body: list[Command] | None = None  # body of the function that is being defined
        self._open: list[_Frame] = []
        # The values of a function's local variables outside the function.
        self._locals: list[dict[str, tuple[list[str] | None, str | None]]] = []
        self._count = 0

    def run(self, commands: Sequence[Command]) -> None:
        """Read commands in order."""
        for command in commands:
            body, depth, state = self._body, len(self._open), self.state(is_needed=command.is_apart)
            self._read(command, command.words)
            if body is not None:
                body.append(command)
            elif command.is_apart and len(self._open) == depth:
                self.restore(state)

    def _begin(
        self, command: Command, word: str, function: str = '', *, never_runs: bool = False
    ) -> None:
        is_branch = word not in '{(' or command.is_conditional
        is_apart = word == '(' or command.before in ('|', '|&') or never_runs
        self._open.append(_Frame(word, command.line, is_branch, is_apart, self.state(), function))

    def _end(self, command: Command) -> None:
        frame = self._open.pop()
        if frame.function and self._body is not None:
            if not any(each.function for each in self._open):
                self.functions[frame.function], self._body = self._body, None
        elif frame.is_apart or command.after in ('|', '|&', '&'):
            self.restore(frame.state)

    def call(
        self,
        name: str,
        command: Command,
        arguments: list[str] | None,
        assigned: Sequence[Word] = (),
    ) -> None:
        """Read the body of a function where it is called, with the variables set for this call.

        The arguments are None if the text does not call the function.
        """
        if name in self.called[len(self.called) - len(self._locals) :]:
            return  # a function that calls itself
        self.called.append(name)
        self._locals.append({ARGUMENTS: (self.values.get(ARGUMENTS), self.reasons.get(ARGUMENTS))})
        self.set_arguments(arguments, f'the text does not call {name}')
        if command.is_conditional:
            self._begin(command, '&&')
        for word in assigned:
            self._set_locally(word)
            self._assign(command, word)
        self.run(self.functions[name])
        if command.is_conditional:
            self._open.pop()
        for variable, (value, reason) in self._locals.pop().items():
            self.forget(variable, reason or '')
            if reason is None:
                del self.reasons[variable]
            if value is not None:
                self.values[variable] = value

    def _set_locally(self, word: Word) -> None:
        if self._locals and (name := word.name or word.text):
            self._locals[-1].setdefault(name, (self.values.get(name), self.reasons.get(name)))

    def _read(self, command: Command, words: Sequence[Word]) -> None:
        self._count += 1
        if self._count > MAX_COMMANDS:
            raise ConfigError(f'{self.source}: has more than {MAX_COMMANDS:,} commands; {WAY_OUT}')
        first = words[0].text if words else None
        if first and self._open and BEGIN.get(self._open[-1].word) == first:
            self._end(command)
        if first in BEGIN:
            self._begin(command, first, never_runs=first == 'for' and self.lists_nothing(words))
        if first == 'function' and len(words) > 2:
            self._begin(command, words[2].text or '{', words[1].text or '?')
            if self._body is None:
                self._body = [command._replace(words=tuple(words[2:]))]
            self._read(command, words[3:])
        elif first in BEFORE_COMMANDS:
            self._read(command, words[1:])
        elif self._body is not None:
            return
        elif first == 'for' and len(words) > 1 and words[1].text:
            self.forget(words[1].text, f'`for` in line {command.line} sets it')
        elif words and (first in DECLARE or all(word.name for word in words)):
            for word in self._declared(command, words) if first in DECLARE else words:
                if first in ('local', 'declare', 'typeset'):
                    self._set_locally(word)
                if word.name:
                    self._assign(command, word)
        elif words and first not in (*BEGIN, 'function'):
            self._simple(command, words)

    def _declared(self, command: Command, words: Sequence[Word]) -> Iterator[Word]:
        """Yield the words of `export` and the like; a text such as "$NAME=4" is an assignment."""
        for word in words:
            if word.name:
                yield word
                continue
            for text in self.expand(word.parts):
                if self.forget_element(text, command.line):
                    continue
                if match := ASSIGNMENT.match(text):
                    yield Word((text[match.end() :],), match[0][:-1])
                elif UNKNOWN.search(text):
                    self.forget_all(f'`{words[0].text}` in line {command.line} may set it')
                else:
                    yield Word((text,))

    def _assign(self, command: Command, word: Word) -> None:
        name, value = word.name or '', self._elements(word)
        if name == ARGUMENTS and self.are_all(value):
            return
        branch = next((frame for frame in reversed(self._open) if frame.is_branch), None)
        if branch or command.is_conditional:
            what = branch.word if branch and branch.word not in '{(' else '&&'
            self.forget(name, f'`{what}` in line {(branch or command).line} sets it')
        elif word.adds and (reason := self._reason(name)) is not None:
            self.forget(name, reason)
        elif not word.adds:
            self.values[name] = value
        elif word.elements is not None:
            self.values[name] = [*self.values.get(name, []), *value]
        else:
            self.values[name] = [''.join([*self.values.get(name, []), *value])]

    def _elements(self, word: Word) -> list[str]:
        if word.elements is not None:
            value = [part for element in word.elements for part in self.expand(element.parts)]
        else:
            value = [''.join(self.joined(part) for part in word.parts)]
        self.check_size(value)
        return value

    def _simple(self, command: Command, words: Sequence[Word]) -> None:
        """Read a command that is neither an assignment nor a part of a branch."""
        expanded = [part for word in words for part in self.expand(word.parts, word.name)]
        if expanded and self.forget_element(expanded[0], command.line):
            return
        program = next((word for word in expanded if not ASSIGNMENT.match(word)), None)
        if program == 'printf' and '-v' in expanded:
            program = 'printf -v'
        if program in SETTERS:
            reason = f'`{program}` in line {command.line} changes it'
            self.forget_set(program, ' '.join(expanded[1:]), reason)
        if program in self.functions:
            arguments = expanded[expanded.index(program) + 1 :]
            self.call(program, command, arguments, [word for word in words if word.name])
            return
        if program == 'set' and '--' in (texts := [word.text for word in words]):
            new = tuple(words[texts.index('--') + 1 :])
            self._assign(command, Word((), ARGUMENTS, elements=new))
        elif program == 'shift' and ARGUMENTS in self.values:
            self.forget(ARGUMENTS, f'`shift` in line {command.line} changes it')
        elif program in ('source', '.', 'eval'):
            given = expanded[expanded.index(program) + 1 :]
            if program == 'eval':
                text = ' '.join(given)
                is_kept = not UNKNOWN.match(text) or ENVIRONMENT.fullmatch(plain(text))
            else:
                is_kept = not given or ENVIRONMENT_FILE.fullmatch(plain(given[0]))
            if not is_kept:
                self.forget_all(f'`{program}` in line {command.line} may set it')
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
            self._run_shell(command, words, expanded, inner)
        elif program.startswith('-'):
            if self.launches and not command.is_conditional:
                launch = self.launches[-1]  # the line before lacks a backslash
                launch.words.extend(expanded)
                self.launches[-1] = launch._replace(joined=launch.joined or command.line)
            elif not command.is_conditional:
                self.launches.append(Launch(expanded, command.line))
        elif program_of(expanded) is not None:
            self.launches.append(Launch(expanded, command.line))

    def _run_shell(
        self, command: Command, words: Sequence[Word], expanded: list[str], option: int
    ) -> None:
        """Read the text after `-c`, the word with index `option`, with its own variables."""
        state, text = self.state(), expanded[option + 1]
        names = [word for word in words if word.name]
        if UNKNOWN.search(text):  # a variable in it may be the outer shell's
            self.set_arguments(None, 'an argument of the script')
            for word in names:
                self.forget(word.name or '', f'line {command.line} sets it for one command')
        else:
            for word in names:
                self._assign(command, word)
            self.set_arguments(expanded[option + 3 :], '')
        self._run_inner(command, expanded[: option - 1], plain(text))
        self.restore(state)

    def _run_inner(self, command: Command, before: list[str], text: str) -> None:
        """Read the text that a command passes to a different shell."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ConfigError(f'{self.source}: line {command.line}: shells within shells')
        count = len(self.launches)
        self.run([each._replace(line=command.line) for each in commands_of(text, self.source)])
        self.launches[count:] = [
            each._replace(words=before + each.words) for each in self.launches[count:]
        ]
        self.depth -= 1
