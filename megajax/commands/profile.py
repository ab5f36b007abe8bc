"""`megajax profile`: parse, call, render."""

from pathlib import Path
from typing import Annotated

import typer

from megajax.base.files.outputs import check_outputs, writing
from megajax.base.render.console import plain_console

LONGEST = 10  # default of --top


def profile(
    run: Annotated[Path, typer.Argument(metavar='RUN', help='A run directory with a trace.')],
    gpu: Annotated[
        str | None,
        typer.Option(
            help='GPU to compare with, or a YAML file from plan calibrate; default: the GPU of '
            'the trace.'
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help='Lines per table; also adds a table of the longest instructions.'),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help='Write the complete result to this file.')
    ] = None,
) -> None:
    """Show where the time of traced steps went.

    It reads the trace that train.profile wrote, and lists matmuls, other kernels, collectives and
    idle time. If the GPU is known, it compares the measured times with the GPU's peak, with
    inspect's roofline and with plan.
    """
    check_outputs(json)
    from megajax.analysis.profile import profile as read  # here, because it imports jax
    from megajax.analysis.profile.report import tables
    from megajax.base.render.console import as_text

    result = read(run, gpu=gpu)
    console = plain_console()
    shown = tables(result, top=top or LONGEST, with_instructions=top is not None)
    with writing((json, result.model_dump_json(indent=2))):
        console.print(
            shown if console.is_terminal else as_text(shown),
            soft_wrap=not console.is_terminal,
        )
