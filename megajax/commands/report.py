"""`megajax report`: parse, call, render."""

import os
from pathlib import Path
from typing import Annotated

import typer

from megajax.base.files.outputs import check_outputs


def report(
    runs: Annotated[list[Path], typer.Argument(metavar='RUN', help='Run directories.')],
    out: Annotated[
        Path | None,
        typer.Option(help='The file; report.html in the run, or here for several runs.'),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help='Predict for this GPU, or for a YAML file such as plan calibrate writes; '
            'by default the devices of the run.'
        ),
    ] = None,
) -> None:
    """Write a page on runs: losses, cost, faults, time and speed.

    It is one HTML file without scripts. Beside the measured step stand plan's prediction and
    inspect's collectives. Nothing is compiled, and a run may be going on.
    """
    check_outputs(out)
    os.environ['JAX_PLATFORMS'] = 'cpu'  # no device is needed, and a run may be using them
    from megajax.analysis.report import write_report  # here, because it imports jax

    print(f'report     {write_report(runs, out, gpu=gpu)}')
