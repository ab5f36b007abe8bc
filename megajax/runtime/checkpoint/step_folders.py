"""The folders of a run's steps: verify them, reject damaged ones, and delete steps.

The first process reads and deletes, and all processes hash. With several processes, all of them
call the same methods.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from megajax.base.render.text import typed
from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.digests import (
    COMMIT,
    find_foreign,
    find_steps,
    foreign_step,
    is_finished,
    problems,
    strangers,
)
from megajax.runtime.checkpoint.record import recorded_due
from megajax.runtime.checkpoint.shared_digests import shared_problems
from megajax.runtime.checkpoint.strays import delete_folder, move_aside, sweep, warn_of_strays
from megajax.runtime.processes.consensus import from_first

PROBE = 1 << 16  # number of bytes; more than Orbax writes before its arrays

logger = logging.getLogger(__name__)


class StepFolders:
    """The folders in `folder`, one for each step, and the steps that were rejected."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._refused: set[int] = set()
        self._failed: set[int] = set()
        self._named: set[Path] = set()
        self._swept = False

    def find_newest(self) -> int | None:
        """Return the newest step whose digests match; None if no step was ever finished.

        Each newer step that is rejected is logged with the reason. Raises CheckpointError if all
        steps are rejected.
        """
        steps, foreign = list[int](), list[Path]()
        if jax.process_index() == 0:
            warn_of_strays(self.folder, self._named)
            steps, foreign = find_steps(self.folder), find_foreign(self.folder)
        num_steps, count = from_first(len(steps), len(steps) + len(foreign))
        steps = from_first(*(steps or [0] * num_steps))
        newest = next((step for step in reversed(steps) if not self.refuses(step)), None)
        if count and newest is None:
            raise CheckpointError(
                f'none of the {count} checkpoints in {self.folder} can be used: '
                f'run megajax checkpoint verify {typed(self.folder.parent)}, '
                'restore their files from a backup, or choose another run.dir to start afresh'
            )
        return newest

    def write_error(self) -> OSError | None:
        """Write and sync an unnamed file in the folder; return the error if that fails.

        A process that fails only inside Orbax's save leaves the others waiting at its barriers.
        """
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(PROBE))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error
        return None

    def refuses(self, step: int) -> bool:
        """Whether a step's digests do not match, which is logged.

        The result is the same in all processes. Raises CheckpointError if a file can be read
        by one of several processes and not by another.
        """
        path = self.folder / str(step)
        faults = shared_problems(path)
        if faults:
            self._refused.add(step)
        if jax.process_index() > 0:
            return bool(faults)
        if faults:
            more = f' (and {len(faults) - 1} more)' if len(faults) > 1 else ''
            logger.warning('checkpoint %s is rejected: %s%s', path, faults[0], more)
        elif extra := strangers(path):
            logger.warning(
                'checkpoint %s contains %s, which does not belong to it: ignored',
                path,
                ', '.join(extra[:3]),
            )
        return bool(faults)

    def is_junk(self, step: int) -> bool | None:
        """Whether a step was rejected; None if its folder is not the run's own.

        A link is not the run's own, and neither is a folder that contains a different step than its
        name says.
        """
        path = self.folder / str(step)
        return (
            None if path.is_symlink() or foreign_step(path) is not None else step in self._refused
        )

    def due(self, step: int) -> int:
        """The step since which the save of `step` was due."""
        return recorded_due(self.folder / str(step)) or step

    def is_finished(self, step: int) -> bool:
        """Whether the save of a step is finished; equal in all processes."""
        return bool(from_first(is_finished(self.folder / str(step)))[0])

    def clear_place(self, step: int) -> tuple[bool, bool]:
        """Return whether a usable checkpoint of `step` exists, and whether a folder is in the way.

        A folder that is not the run's own is moved aside. The first call also deletes unfinished
        saves, and each call what threads of failed saves have written since. Raises CheckpointError
        if a folder cannot be moved aside.
        """
        path, sound, in_the_way = self.folder / str(step), False, False
        error: CheckpointError | None = None
        if jax.process_index() == 0:
            if not self._swept:
                sweep(self.folder)
            self.clear_failed()
            try:
                in_the_way = move_aside(path) or is_finished(path) or path.is_symlink()
            except CheckpointError as failure:
                error = failure
            sound = (
                is_finished(path)
                and step not in self._refused
                and not problems(path, contents=False)
            )
        self._swept = True
        failed, sound, in_the_way = map(bool, from_first(error is not None, sound, in_the_way))
        if failed:
            raise error or CheckpointError(f'{path} is in the way: the first process says why')
        return sound, in_the_way

    def renew(self, step: int) -> None:
        """Forget that `step` was rejected, because it is being written again."""
        self._refused.discard(step)
        self._failed.discard(step)

    def remove_failed(self, step: int) -> None:
        """Delete the folder of a failed save.

        Orbax reports the first array that fails while others are still being written, and these
        create their folder again: `clear_failed` deletes it then.
        """
        self._failed.add(step)
        self.remove([step])

    def clear_failed(self) -> None:
        """Delete the folders of failed saves that exist again; called in the first process."""
        for path in (self.folder / str(step) for step in self._failed):
            if path.is_dir() and not path.is_symlink() and not is_finished(path):
                delete_folder(path)

    def remove(self, steps: Sequence[int]) -> None:
        """Delete these steps in the first process, the newest first.

        If the process is killed meanwhile, a partly deleted step does not look finished.
        """
        if jax.process_index() == 0:
            for path in (self.folder / str(step) for step in sorted(steps, reverse=True)):
                if path.is_symlink():
                    path.unlink()
                else:
                    with contextlib.suppress(OSError):
                        (path / COMMIT).unlink()
                    delete_folder(path)
        from_first(0)  # the other processes wait

    def remove_after(self, step: int) -> None:
        """Delete all steps newer than `step`."""
        self.remove(
            [newer for newer in find_steps(self.folder) if newer > step]
            if jax.process_index() == 0
            else []
        )
