"""`megajax report`: parse, call, render."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megajax.base.files.exists import is_file
from megajax.base.files.outputs import check_outputs
from megajax.base.render.logs import log_to_terminal


def report(
    runs: Annotated[list[Path], typer.Argument(metavar='RUN...', help='Run directories.')],
    out: Annotated[
        Path | None,
        typer.Option(
            help='Output file; default: report.html in the run, or here for several runs.'
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help='GPU to predict for, or a YAML file from plan calibrate; default: the GPU of the '
            'run.'
        ),
    ] = None,
) -> None:
    """Write an HTML report on runs.

    The report is one file without scripts. It shows losses, cost, problems, time and speed, and
    compares the measured step with plan's prediction and XLA's collectives with Megatron's. Nothing
    is compiled; a run may still be in progress.
    """
    check_outputs(out)
    log_to_terminal()
    os.environ['JAX_PLATFORMS'] = 'cpu'  # no device is needed, and a run may be using them
    from megajax.analysis.report import write_report  # here, because it imports jax

    path = write_report(runs, out, gpu=gpu)
    if is_file(path):  # a pipe gets only the report
        print(f'report     {path}')
