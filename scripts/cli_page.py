"""Write the reference of the command line: python scripts/cli_page.py > docs/cli.md"""

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.main import get_command

from megajax.commands.main import app

HEAD = """\
# Command line and exit codes

`megajax COMMAND --help` prints the same text in a terminal. `python scripts/cli_page.py` writes
this page from the commands. `megajax --version` prints the version.

`CONFIG` is a preset (`megajax config list`) or a YAML file. `KEY=VALUE` overrides a key of the
config, for example `mesh.model=4`: see [Config keys](config.md). An option without a default in
these tables is off or unset.

## Exit codes

Commands exit with these codes, apart from signals (below). The codes above 2 come from `train` and
`launch`, 4 also from commands that read a checkpoint, and 75 also from `inspect fuzz`.

| code | meaning | what to do |
|---|---|---|
| 0 | done | |
| 1 | a check failed (the command's section says which), XLA compiled the step wrongly, or a bug | read the last lines; do not retry |
| 2 | a mistake in the command, the config or the data | fix it; do not retry |
| 3 | a loss or gradient that is not finite, or loss spikes that cannot be skipped | change the config; do not retry |
| 4 | no checkpoint can be used, or the last save failed | see [Handle failures](failures.md) |
| 5 | silent data corruption: a repeated step gave a different result (`train.replay_every`) | test the device; do not retry on it |
| 75 | stopped by a signal or a time limit, another process was lost, or `inspect fuzz` had no memory or disk space | run the same command again; `train` resumes only with the same `run.dir` |
| 124 | the run hung, and the watchdog ended it | read `watchdog.log`, then run the same command with the same `run.dir` |

If a crash such as SIGSEGV ends a process, `launch` exits with 128 plus the signal's number, as a
shell does. It exits with 75 after SIGKILL, which the kernel sends if memory runs out, and after
SIGABRT, with which jax ends a process whose coordinator is gone: a restart may help. A process that
`launch` did not start exits with 134 after SIGABRT. `data build` and `inspect fuzz` exit with 130
after Ctrl-C; the same command resumes them.
"""  # noqa: E501


def commands(command: Any, path: str = 'megajax') -> Iterator[tuple[str, Any]]:
    """Yield every command that is not hidden, with its words."""
    if command.hidden:
        return
    if not hasattr(command, 'commands'):
        yield path, command
    for name, one in getattr(command, 'commands', {}).items():
        is_default = name == getattr(command, 'default', None)
        yield from commands(one, path if is_default else f'{path} {name}')


def page() -> str:
    """Return the page docs/cli.md."""
    found = [*commands(get_command(app))]
    rows = [
        f'| [`{path}`](#{path.replace(" ", "-")}) | {_cell(_help(command).partition(chr(10))[0])} |'
        for path, command in found
    ]
    index = ['## Commands', '', '| command | |', '|---|---|', *rows, '']
    return '\n'.join([HEAD, *index, *(_section(path, command) for path, command in found)])


def _section(path: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == 'argument']
    options = [param for param in command.params if param not in arguments and not param.hidden]
    words = [path, *(['[OPTIONS]'] if options else []), *map(_usage, arguments)]
    parts = [f'## {path}', '', '```text', ' '.join(words), '```', '', _help(command), '']
    types = get_type_hints(command.callback, include_extras=False)
    if arguments:
        rows = [f'| {_words(_name(param))} | {_cell(param.help or "")} |' for param in arguments]
        parts += ['| argument | |', '|---|---|', *rows, '']
    if options:
        rows = [
            f'| `{", ".join(param.opts)}` | {_type(param, types[param.name])} '
            f'| {_default(param)} | {_cell(param.help or "")} |'
            for param in options
        ]
        parts += ['| option | value | default | |', '|---|---|---|---|', *rows, '']
    return '\n'.join(parts)


def _help(command: Any) -> str:
    return re.sub(r'(?<!\\)<', '&lt;', command.help or '')


def _name(param: Any) -> str:
    return param.metavar or param.name.upper()


def _usage(argument: Any) -> str:
    shown = _name(argument)
    if argument.required:
        return shown
    return f'[{shown}]{"..." if argument.nargs == -1 else ""}'


def _type(param: Any, hint: Any) -> str:
    """Return what an option takes: its choices, its placeholder or its Python type."""
    plain = [one for one in get_args(hint) or [hint] if one is not type(None)]
    kind = hint if get_origin(hint) is Literal else plain[0]
    if get_origin(kind) is Literal:
        return ', '.join(f'`{choice}`' for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ', '.join(f'`{choice.value}`' for choice in kind)
    if kind is bool:
        return ''
    if param.metavar:
        return _words(param.metavar)
    return {int: 'integer', float: 'number', Path: 'path'}.get(kind, 'text')


def _words(metavar: str) -> str:
    """Return a placeholder without its bars, which would end a cell of a table."""
    return ' or '.join(f'`{one.strip()}`' for one in metavar.split('|'))


def _default(param: Any) -> str:
    if param.required:
        return 'required'
    is_off = param.default is None or param.default is False
    return '' if is_off else f'`{param.default}`'


def _cell(text: str) -> str:
    """Return a text for a cell of a table, which a bar would end."""
    return ' '.join(text.split()).replace('|', r'\|').replace('<', '&lt;')


if __name__ == '__main__':
    print(page(), end='')
