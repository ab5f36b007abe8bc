"""What lies among the checkpoints of a run and is none of them: left alone, named once, and moved aside where it is in the way."""

import contextlib
import logging
import shutil
from pathlib import Path

from megajax.checkpoint.digests import STAMP, foreign_step, is_finished, is_step_name

logger = logging.getLogger(__name__)


def warn_of_strays(folder: Path, named: set[Path]) -> None:
    """Name what is no checkpoint of the run, but for what is in `named` already, to which it is added."""
    for path in sorted(set(folder.iterdir()) - named):
        if (step := foreign_step(path)) is not None:
            logger.warning('%s holds step %d, not the one of its name: ignored', path, step)
        elif not is_step_name(path.name):
            logger.warning('%s is no checkpoint: ignored', path)
        elif not is_finished(path):
            logger.warning('%s was never finished: ignored', path)
        else:
            continue
        named.add(path)


def move_aside(path: Path) -> bool:
    """Rename a folder that holds another step than its name says, which is not the run's to take away; whether it was one."""
    step = foreign_step(path)
    if step is None:
        return False
    new = path.with_name(f'{path.name}.holds-{step}')
    with contextlib.suppress(OSError):
        path.rename(new)
        logger.warning('%s holds step %d and is in the way: it is now %s', path, step, new)
    return True


def sweep(folder: Path) -> None:
    """Take away what Orbax began and did not finish; `STAMP` is its first file, so that no other folder is touched."""
    for path in folder.iterdir():
        if (
            is_step_name(path.name)
            and not path.is_symlink()
            and (path / STAMP).is_file()
            and not is_finished(path)
        ):
            shutil.rmtree(path, ignore_errors=True)
