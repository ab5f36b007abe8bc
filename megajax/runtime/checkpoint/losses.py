"""The validation losses of a run's checkpoints, in memory and in the folders of the steps."""

import logging
from pathlib import Path

import jax

from megajax.base.files.outputs import write_file
from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.digests import is_finished
from megajax.runtime.checkpoint.record import VALIDATION, read_record

logger = logging.getLogger(__name__)


class ValidationLosses:
    """The validation loss of each step in `folder`, written once the step is finished."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._losses: dict[int, float | None] = {}
        self._unwritten: dict[int, float] = {}

    def of(self, step: int) -> float | None:
        """The validation loss at a step; None if it was not measured or its record is damaged."""
        if step not in self._losses:
            try:
                self._losses[step] = read_record(self.folder / str(step)).validation_loss
            except CheckpointError:
                self._losses[step] = None
        return self._losses[step]

    def begin(self, step: int, loss: float | None) -> None:
        """Remember the loss that the record of `step` contains; the save of `step` begins."""
        self._losses[step] = loss

    def note(self, step: int, loss: float) -> None:
        """Store the loss of `step`, measured after its save began, until `write` writes it."""
        self._losses[step] = self._unwritten[step] = loss

    def write(self) -> None:
        """Write the noted losses of finished steps, and drop the losses of all other steps."""
        for step, loss in self._unwritten.items():
            if jax.process_index() == 0 and is_finished(self.folder / str(step)):
                try:
                    write_file(self.folder / str(step) / VALIDATION, f'{loss!r}\n'.encode())
                except OSError as error:
                    logger.warning(
                        'the validation loss of checkpoint %d could not be written: %s',
                        step,
                        error.strerror,
                    )
        self._unwritten.clear()
