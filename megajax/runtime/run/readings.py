"""The files `readings-STEP.png` of a run directory: images with their transcriptions."""

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def readings_file(folder: Path, step: int) -> Path:
    """Return the file of the transcriptions after `step`."""
    return folder / f'readings-{step}.png'


def find_readings(folder: Path) -> dict[int, Path]:
    """Return the files in a run directory by step, in no particular order."""
    found = (path for path in folder.glob('readings-*.png') if path.stem[9:].isdecimal())
    return {int(path.stem[9:]): path for path in found}


def rewind_readings(folder: Path, step: int) -> None:
    """Delete the files of steps after `step`; if that fails, log a warning."""
    for number, path in find_readings(folder).items():
        if number > step:
            try:
                path.unlink()
            except OSError as error:
                why = error.strerror
                logger.warning('%s cannot be deleted (%s); the run continues', path, why)
