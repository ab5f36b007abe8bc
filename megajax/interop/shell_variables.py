"""The variables of a shell script, and the words that expand to their values.

Values that the text does not determine are marked as unknown, with the reason. Imports no jax.
"""

import ast
import operator
import re
from collections.abc import Sequence

from megajax.core.config import ConfigError
from megajax.interop.megatron.command_line.shell import Expansion, Part, Word, word_of

MAX_CHARACTERS = 2**20  # most characters of all words after expansion
MAX_DEPTH = 20  # deepest nesting of commands, and of defaults
OPEN, CLOSE = '\ue000', '\ue001'  # around a piece whose value is not known
UNKNOWN = re.compile(f'{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}')
# Commands that change variables: a sum changes the variables that it assigns, other commands change
# all variables that they name.
SETTERS = {
    'let': re.compile(
        r'([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)'
    ),
    **dict.fromkeys(
        ('read', 'mapfile', 'readarray', 'getopts', 'unset', 'printf -v'),
        re.compile(r'(?<![\w-])([A-Za-z_]\w*)()'),
    ),
}
# Files for `source`, and commands whose output is for `eval`, that set no variable of a training.
ENVIRONMENT_FILE = re.compile(
    r'(.*/)?(activate|enable|\.?(ba|z)shrc|\.(bash_|z)?profile|init/(ba|z|k)?sh'
    r'|etc/profile(\.d/.*)?|(conda|mamba|setvars|set_env|setup-env|hpcx-init[^/]*)\.sh)',
    re.DOTALL,
)
ENVIRONMENT = re.compile(
    r'.*[$`].*\b((micro)?mamba|conda|pyenv|ssh-agent|modulecmd|lmod|spack)\b.*',
    re.DOTALL,
)
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
}
ARGUMENTS = '@'  # name of the variable with all arguments of a script or a function
# The words after `in` of a loop over all arguments.
ALL_ARGUMENTS = [Expansion('$@', True)], [Expansion('$@', False)], [Expansion('$*', False)]
ANY = '*'  # key of the reason why every variable without a value is unknown
ELEMENT = re.compile(r'([A-Za-z_]\w*)\[[^]]*\]\+?=')
ARGUMENT = re.compile(r'[1-9]\d{0,3}|[@*#]')
LARGEST, MAX_SUM = 2**53, 1000  # largest number, and most characters of a sum

State = tuple[dict[str, list[str]], dict[str, str]]


def plain(word: str) -> str:
    """Return a word as it was written, without the marks of unknown pieces."""
    return word.replace(OPEN, '').replace(CLOSE, '')


def mark(match: re.Match[str]) -> str:
    """Return a text, marked as unknown."""
    return f'{OPEN}{match[0]}{CLOSE}'


class Variables:
    """The values of a script's variables at one line, or why they are unknown."""

    def __init__(self, source: str):
        self.source = source
        self.values: dict[str, list[str]] = {}
        self.reasons: dict[str, str] = {}
        self.depth = 0  # current nesting of commands, and of defaults

    def state(self, *, is_needed: bool = True) -> State:
        """Return the current variables for a later `restore`; nothing if not needed."""
        return (dict(self.values), dict(self.reasons)) if is_needed else ({}, {})

    def restore(self, state: State) -> None:
        """Set the variables to an earlier state."""
        self.values, reasons = state
        expansions = {text: why for text, why in self.reasons.items() if text[:1] in '$`'}
        self.reasons = reasons | expansions

    def forget(self, name: str, reason: str) -> None:
        """Make a variable unknown."""
        self.values.pop(name, None)
        self.reasons[name] = reason

    def forget_all(self, reason: str) -> None:
        """Make every variable unknown until it is set again."""
        for name in self.values.keys() - {ARGUMENTS}:
            self.forget(name, reason)
        self.reasons[ANY] = reason

    def forget_element(self, text: str, line: int) -> bool:
        """Forget an array if a word sets an element of it; return whether it does."""
        if element := ELEMENT.match(text):
            self.forget(element[1], f'line {line} sets an element of it')
        return bool(element)

    def set_arguments(self, arguments: list[str] | None, reason: str) -> None:
        """Set the arguments of a function or a shell; with None, they are unknown.

        A function that only gets `"$@"` has the arguments of the script, which may be none.
        """
        if arguments is not None and self.are_all(arguments):
            return
        self.forget(ARGUMENTS, reason)
        if arguments is not None:
            self.values[ARGUMENTS] = arguments
            del self.reasons[ARGUMENTS]

    def are_all(self, words: Sequence[str]) -> bool:
        """Return whether words are the current arguments `"$@"`, which are unknown."""
        return words == [f'{OPEN}$@{CLOSE}'] and ARGUMENTS not in self.values

    def lists_nothing(self, words: Sequence[Word]) -> bool:
        """Return whether a `for` is over the arguments of the script, which is read without any."""
        listed = [part for word in words[3:] for part in word.parts if part]
        is_set = ARGUMENTS in self.values or ARGUMENTS in self.reasons
        return not is_set and (len(words) == 2 or listed in ALL_ARGUMENTS)

    def forget_set(self, program: str, text: str, reason: str) -> bool:
        """Forget the variables that a command changes; return whether there are any."""
        names = [a or b for a, b in SETTERS[program].findall(text)]
        for name in names:
            self.forget(name, reason)
        return bool(names)

    def expand(self, parts: Sequence[Part], name: str | None = None) -> list[str]:
        """Return the words that a word expands to: if unquoted, there may be none or several."""
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
                self.check_size(words)
        return words

    def joined(self, part: Part) -> str:
        """Return the value of a part of a word, not split into several words."""
        return part if isinstance(part, str) else ' '.join(self._value(part))

    def _value(self, part: Expansion) -> list[str]:
        """Return the values of `$NAME`, `${NAME[@]}`, `${NAME:-default}` or `$((sum))`."""
        text = part.text
        if text.startswith('$(('):
            return self._sum(text)
        if text.startswith(('$(', '`')):
            return [self.unknown(text, 'the output of a command')]
        inner = text[2:-1] if text.startswith('${') else text[1:]
        match = re.fullmatch(r'(\w+|[@*#?$!-])(?:\[([@*])\])?(?:(:?[-=?])(.*))?', inner, re.DOTALL)
        if not match:
            return [self.unknown(text, 'a rewriting of a variable')]
        name, every, default, instead = match.groups()
        is_argument = bool(ARGUMENT.fullmatch(name))
        values = self._argument(name) if is_argument else self.values.get(name)
        every = name if name in ('@', '*') else every
        if values is not None and (values != [''] or not default):
            return [' '.join(values)] if every == '*' else list(values if every else values[:1])
        reason = self.reasons.get(ARGUMENTS) if is_argument else self._reason(name)
        if default and default[-1] != '?' and reason is None:
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise ConfigError(f'{self.source}: {text:.80}: defaults are nested too deeply')
            values = [''.join(self.joined(piece) for piece in word_of(instead, self.source))]
            self.depth -= 1
            if '=' in default and not is_argument:
                self.values[name] = values
            return values
        if reason is None:
            is_variable = re.match('[A-Za-z_]', name)
            reason = 'the text does not set it' if is_variable else 'an argument of the script'
        return [self.unknown(text, reason)]

    def _argument(self, name: str) -> list[str] | None:
        """Return the values of `$1`, `$@`, `$*` or `$#`; None if the arguments are not known."""
        words = self.values.get(ARGUMENTS)
        if words is None or name in ('@', '*'):
            return words
        index = len(words) if name == '#' else int(name) - 1
        if any(OPEN in word for word in words[:index]):
            return [self.unknown(f'${{{name}}}', 'an unknown value before it may be several words')]
        return [str(index)] if name == '#' else words[index : index + 1] or ['']

    def _reason(self, name: str) -> str | None:
        """Return why a variable is unknown; None if it is known, or if the text never sets it."""
        why = self.reasons.get(ANY) if re.match('[A-Za-z_]', name) else None
        return None if name in self.values else self.reasons.get(name, why)

    def _sum(self, text: str) -> list[str]:
        if len(text) > MAX_SUM:
            return [self.unknown(text, 'a long sum')]
        if self.forget_set('let', text, f'`{plain(text)}` changes it'):
            return [self.unknown(text, 'a sum that changes a variable')]
        inner = re.sub(
            r'\$?\{?\b([A-Za-z_]\w*)\b\}?', lambda match: self._number(match[1]), text[3:-2]
        )
        try:
            return [str(_number(ast.parse(inner.strip(), mode='eval').body))]
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return [self.unknown(text, 'a sum of numbers that the text does not have')]

    def _number(self, name: str) -> str:
        return f'({"".join(self.values.get(name, ["?"]))})'

    def unknown(self, text: str, reason: str) -> str:
        """Return a piece that is marked as unknown."""
        text = plain(text)
        self.reasons[text] = reason
        return f'{OPEN}{text}{CLOSE}'

    def check_size(self, words: Sequence[str]) -> None:
        """Raise ConfigError if words are too long."""
        if sum(map(len, words)) > MAX_CHARACTERS:
            raise ConfigError(
                f'{self.source}: its variables make more than {MAX_CHARACTERS:,} characters'
            )


def _fields(value: str) -> list[str]:
    """Split a value at its blanks, but not within unknown pieces."""
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
