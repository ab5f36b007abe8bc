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
        self._last_noted: tuple[int, float] | None = None

    def of(self, step: int) -> float | None:
        """The validation loss at a step; None if it was not measured or its record is damaged."""
        if step not in self._losses:
            try:
                self._losses[step] = read_record(self.folder / str(step)).validation_loss
            except CheckpointError:
                self._losses[step] = None
        return self._losses[step]

    def begin(self, step: int, loss: float | None) -> float | None:
        """Return the loss that the record of `step` is to contain; the save of `step` begins.

        If `loss` is None, it is the loss that was noted last, if that is of this step.
        """
        if loss is None and self._last_noted is not None and self._last_noted[0] == step:
            loss = self._last_noted[1]
        self._losses[step] = loss
        return loss

    def forget_noted(self) -> None:
        """Forget the loss that was noted last; the run returns to an earlier step."""
        self._last_noted = None

    def note(self, step: int, loss: float) -> None:
        """Store the loss of `step`, measured after its save began, until `write` writes it.

        If `step` was not due to be saved, a save of it that begins now gets the loss.
        """
        self._losses[step] = self._unwritten[step] = loss
        self._last_noted = step, loss

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
