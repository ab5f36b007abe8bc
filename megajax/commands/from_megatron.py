"""`megajax config from-megatron`: parse, call, render."""

from typing import Annotated

import typer

# Megatron-LM's arguments are no options of this command: `interop/megatron/command_line/line.py`
# reads them.
SETTINGS = {'ignore_unknown_options': True}


def from_megatron(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='COMMAND',
            help='A command line of pretrain_gpt.py or pretrain_bert.py, with its launcher or '
            'without; @FILE and - stand for the text of a file and of standard input.',
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help='The number of GPUs, where the command does not have it.'),
    ] = None,
) -> None:
    """Print the config of a command of Megatron-LM."""
    from megajax.interop.megatron.command_line.line import read_line
    from megajax.interop.megatron.command_line.to_config import from_megatron

    print(from_megatron(read_line(arguments, world_size=gpus)), end='')
