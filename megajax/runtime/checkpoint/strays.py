"""Paths among a run's checkpoints that are not its own.

The run does not delete such a path. It logs the path once, and moves it aside if it is in the way.
"""

import itertools
import logging
import os
import shutil
import time
from pathlib import Path

from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.digests import STAMP, foreign_step, is_finished, is_step_name

logger = logging.getLogger(__name__)


def warn_of_strays(folder: Path, named: set[Path]) -> None:
    """Warn about paths that are neither checkpoints of the run nor in `named`; add them there."""
    for path in sorted(set(folder.iterdir()) - named):
        if (step := foreign_step(path)) is not None:
            logger.warning('%s holds step %d, not the step in its name: ignored', path, step)
        elif not is_step_name(path.name):
            logger.warning('%s is not a checkpoint: ignored', path)
        elif not is_finished(path):
            logger.warning('%s was never finished: ignored', path)
        else:
            continue
        named.add(path)


def move_aside(path: Path) -> bool:
    """Rename a folder whose name gives the wrong step; return False for any other.

    The run does not own such a folder and must not delete it. Raises CheckpointError if it cannot
    be renamed.
    """
    step = foreign_step(path)
    if step is None:
        return False
    first = f'{path.name}.holds-{step}'
    names = itertools.chain([first], (f'{first}.{number}' for number in itertools.count(2)))
    new = next(other for other in map(path.with_name, names) if not os.path.lexists(other))
    try:
        path.rename(new)
    except OSError as error:
        raise CheckpointError(
            f'{path} holds step {step}, is in the way and cannot be renamed to {new.name}: '
            f'{error.strerror}; move it to another folder'
        ) from error
    logger.warning('%s holds step %d and is in the way: it is now %s', path, step, new)
    return True


def sweep(folder: Path) -> None:
    """Delete the folders of unfinished saves.

    `STAMP` is the first file that Orbax writes into such a folder, so folders without it are not
    touched.
    """
    for path in folder.iterdir():
        if (
            is_step_name(path.name)
            and not path.is_symlink()
            and (path / STAMP).is_file()
            and not is_finished(path)
        ):
            delete_folder(path)


def delete_folder(path: Path) -> None:
    """Delete a folder, even if a thread of a failed save still writes into it for a moment."""
    for pause in (0.01, 0.1, 1.0, 0.0):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(pause)
