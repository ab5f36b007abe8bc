"""`megajax profile`: parse, call, render."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megajax.base.files.outputs import check_outputs, with_folder

LONGEST = 10  # lines of a table that are shown unless --top says otherwise


def profile(
    run: Annotated[Path, typer.Argument(metavar='RUN', help='A run directory with a trace.')],
    gpu: Annotated[
        str | None,
        typer.Option(
            help='Compare with this GPU, or with a YAML file such as plan calibrate writes; '
            'by default the GPU of the trace.'
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, help='Show this many lines per table, and the longest instructions.'),
    ] = None,
    json: Annotated[Path | None, typer.Option(help='Write everything to this file.')] = None,
) -> None:
    """Show where the time of traced steps went.

    The steps are those of train.profile, divided among products, collectives, other kernels and
    idle time. A GPU's peak, inspect's roofline and plan stand beside what was measured.
    """
    check_outputs(json)
    from megajax.analysis.profile import profile as read  # here, because it imports jax
    from megajax.analysis.profile.report import tables
    from megajax.base.render.console import as_text

    result = read(run, gpu=gpu)
    if json:
        with_folder(json).write_text(result.model_dump_json(indent=2))
    console = Console(highlight=False)
    shown = tables(result, top=top or LONGEST, with_instructions=top is not None)
    console.print(
        shown if console.is_terminal else as_text(shown),
        soft_wrap=not console.is_terminal,
        markup=False,
    )
