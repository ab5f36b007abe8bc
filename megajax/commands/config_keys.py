"""`megajax config keys`: every key of a config, for a terminal, a pipe or the docs."""

import inspect
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Column, Table

from megajax.base.render.console import plain_console, print_fitting
from megajax.base.render.folded import Folded
from megajax.core.config.keys import Key, keys_in
from megajax.core.config.schema import SECTIONS

_HEAD = """\
# Config keys

Every key that a config file may set, and how it is set on the command line:

```
megajax train my.yaml optim.lr=3e-4 mesh.model=4
megajax config keys mesh             # a section of this page, on a terminal
megajax config show my.yaml          # every key with its value
megajax config conflicts             # the settings that cannot be combined
```

A key with two dots is part of a group. `model.experts.capacity=1.25` changes the group of the file;
without one, set the group as a whole: `train.profile='{start: 10, steps: 3}'`. `lora=null` removes
the section `lora` of the file. A default such as `4 * hidden_size` follows from other keys of the
section. It also does in the config of a run or a checkpoint: `model.hidden_size=1024` changes a
recorded `ffn_size` that equals its formula.
"""


def keys(
    section: Annotated[
        str | None,
        typer.Argument(
            help=f'One of {", ".join(SECTIONS)}, or a key such as train.steps; default: all.'
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option('--markdown', help='Print all keys as the page docs/config.md.')
    ] = False,
) -> None:
    """List every key with its type, default and meaning.

    In a pipe, each key is one line.
    """
    found = keys_in(section)
    console = plain_console()
    if markdown:
        print('\n'.join([_HEAD, *map(_markdown, SECTIONS)]), end='')
    elif console.is_terminal:
        console.print(_narrow(found))
    else:
        print_fitting(Folded(_wide(found)), console)


def _type(key: Key) -> str:
    return f'{key.type}, {key.unit}' if key.unit else key.type


def _wide(found: Iterable[Key]) -> Table:
    """Return a table with one line per key."""
    table = Table('key', 'type', 'default', 'meaning', box=None, pad_edge=False)
    for key in found:
        table.add_row(key.path, _type(key), key.default, key.meaning)
    return table


def _narrow(found: Iterable[Key]) -> Table:
    """Return a table of two columns that never cuts off a key."""
    rest = Column('type, default, meaning', overflow='fold')
    table = Table(Column('key', no_wrap=True), rest, box=None, pad_edge=False)
    for key in found:
        default = key.default if key.default == 'required' else f'default {key.default}'
        table.add_row(key.path, f'{_type(key)}; {default}\n{key.meaning}')
    return table


def _markdown(section: str) -> str:
    """Return the heading, docstring and table of a section, with no bar inside a cell."""
    rows = [
        f'| `{key.path}` | {key.meaning} '
        f'| {key.default if key.default == "required" else f"`{key.default}`"} '
        f'| {key.type.replace(" | ", ", ")}{f" ({key.unit})" if key.unit else ""} |'
        for key in keys_in(section)
    ]
    head = '| key | meaning | default | type (unit) or choices |\n|---|---|---|---|'
    about = inspect.getdoc(SECTIONS[section]) or ''
    return '\n'.join([f'## {section}', '', about, '', head, *rows, ''])
