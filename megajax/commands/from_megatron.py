"""`megajax config from-megatron`: parse, call, render."""

from typing import Annotated

import typer

# Megatron-LM's arguments are not options of this command; `interop/megatron/command_line/line.py`
# reads them.
SETTINGS = {'ignore_unknown_options': True}


def from_megatron(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar='COMMAND',
            help='A command line of pretrain_gpt.py or pretrain_bert.py, with or without its '
            'launcher; @FILE reads it from a file, - from standard input.',
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help='Number of GPUs, if the command does not set it.'),
    ] = None,
) -> None:
    """Convert a Megatron-LM command line to a config, and print it."""
    from megajax.interop.megatron.command_line.line import read_line
    from megajax.interop.megatron.command_line.to_config import from_megatron

    print(from_megatron(read_line(arguments, world_size=gpus)), end='')
