"""Roll a run back to its newest checkpoint after a rejected step."""

import dataclasses

import jax
import numpy as np

from megajax.core.config import Config, ConfigError, NumericError
from megajax.core.train.step import TrainState
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.data import Data
from megajax.runtime.run.log.report import Report

# maximum number of rollbacks without a new checkpoint in between; after that, the run ends
ROLLBACKS = 3


class Rollbacks:
    """The rollbacks of a run, counted from one checkpoint to the next."""

    def __init__(self, config: Config, data: Data, *, report: Report, checkpoints: Checkpoints):
        self.config, self.data, self.report = config, data, report
        self.checkpoints = checkpoints
        self._count = 0

    def reset(self) -> None:
        """Count from 0 again; called when a checkpoint is reached."""
        self._count = 0

    def find_target(self, step: int) -> int:
        """Return the step of the newest checkpoint, to which `step` is to be rolled back.

        Raises NumericError if there is no checkpoint, or if the run has returned to it too often.
        """
        self._count += 1
        self.checkpoints.wait()
        target = self.checkpoints.newest_verified()
        if target is None or self._count > ROLLBACKS:
            why = (
                'there is no checkpoint yet'
                if target is None
                else f'the run was rolled back {ROLLBACKS} times without reaching another'
            )
            raise NumericError(
                f'step {step} cannot be rolled back: {why}; '
                'lower optim.lr, or save more often (checkpoint.every)'
            )
        return target

    def restore(self, step: int, target: int, batches: int) -> TrainState:
        """Return the state of `target`, which continues after the first `batches` batches.

        Newer checkpoints are deleted. A blend may be ordered again, which takes as long as at the
        start of the run. Raises NumericError if the data has too few batches left.
        """
        needed = batches + self.config.train.steps - target
        if needed >= len(self.data.train) and self.config.data.blend:
            # The last batch may not be full. One corpus has no more samples in its passes.
            self.data = self._with_more_batches(needed)
        if needed > len(self.data.train):
            raise NumericError(
                f'step {step} cannot be rolled back: '
                f'the data has too few batches left for the steps after {target}'
            )
        self.report.say(
            f'step {step} is rolled back to step {target}; '
            'its batch and the earlier ones are not read again'
        )
        self.checkpoints.delete_after(target)
        restored = self.checkpoints.restore(target)
        return restored._replace(
            batches=jax.device_put(np.int32(batches), restored.batches.sharding)
        )

    def _with_more_batches(self, needed: int) -> Data:
        """Return data with the same batches and more, if the order of a longer run begins so."""
        old, data = self.data.train, self.data
        if data.train_of is None:
            return data
        try:
            longer = data.train_of(old.samples_before(needed))
        except ConfigError:  # too many samples for the weights of the blend
            return data
        if longer.passes != old.passes:
            return data
        return dataclasses.replace(data, train=longer.going_on(0, old.samples_before(0)))
