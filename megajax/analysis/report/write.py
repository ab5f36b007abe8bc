"""Write the HTML report, without overwriting a file that is not a report."""

import logging
from collections.abc import Sequence
from pathlib import Path

from megajax.analysis.report.page import GENERATOR, page
from megajax.analysis.report.read import read_runs
from megajax.analysis.report.run_facts import Facts
from megajax.base.errors import reason
from megajax.base.files.exists import is_file
from megajax.base.files.outputs import check_outputs, write_output
from megajax.core.config import ConfigError
from megajax.core.hardware.records import hardware

NAME = 'report.html'
# The report that a run itself writes reads compiled steps only up to this many characters, because
# that takes CPU time.
MAX_PROGRAM = 12_000_000
_HEAD = 1000  # bytes at the start of a report that name its generator

logger = logging.getLogger(__name__)


def write_report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    *,
    gpu: str | None = None,
    max_program: int | None = None,
) -> Path:
    """Write a report on the run in a folder, or on the runs in several, and return its path.

    `out` defaults to `report.html`, in the run's folder if there is only one run, else in the
    current folder. `gpu` names the record to predict with, instead of each run's devices. Compiled
    steps with more than `max_program` characters of text are not inspected.

    Raises ConfigError for a folder without a run, and for an output that cannot be written or
    exists and is not a report.
    """
    paths = [Path(each) for each in ([folders] if isinstance(folders, str | Path) else folders)]
    out = Path(out or (paths[0] / NAME if len(paths) == 1 else NAME))
    runs = read_runs(paths)
    check_out(out)
    record = hardware(gpu) if gpu else None
    facts = [
        Facts(run=run, color=number, gpu=record, max_program=max_program)
        for number, run in enumerate(runs)
    ]
    write_output(out, page(facts))
    return out


def check_out(out: Path) -> None:
    """Raise ConfigError if a file cannot be written, or exists and is not a report."""
    check_outputs(out)
    if not is_file(out):
        return
    with out.open('rb') as file:
        start = file.read(_HEAD)
    if start and GENERATOR.encode() not in start:
        raise ConfigError(
            f'{out} exists and is not a megajax report: delete it, or give a different --out'
        )


def write_at_end(folder: Path) -> Path | None:
    """Write the report of a run that is ending, and return its path; log any failure."""
    try:
        return write_report([folder], max_program=MAX_PROGRAM)
    except Exception as error:
        logger.warning('%s cannot be written: %s', NAME, reason(error))
        return None
