"""Measure the time that a process spends between steps: in saving, data loading and Python."""

from megajax.runtime.run.clock import Clock
from megajax.runtime.run.meter import slowest


class BetweenSteps:
    """The seconds between the steps of a run since the last report, by the run's clock."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._own_seconds = self._checkpoint_seconds = 0.0  # clock readings at the last report
        self._steps = 0  # number of steps since the last report

    def begin(self) -> None:
        """Count this process's own seconds from now on; called before the first step."""
        self._own_seconds = self._clock.seconds('data_wait', 'other')

    def checkpoint_ms(self) -> float:
        """Count a step; return the ms for which saving has blocked the run since the previous call.

        Called once after each step.
        """
        self._steps += 1
        before = self._checkpoint_seconds
        self._checkpoint_seconds = self._clock.seconds('checkpoint')
        return 1e3 * (self._checkpoint_seconds - before)

    def find_slowest(self) -> dict[str, float]:
        """Return the process that is last to reach a step; all processes must call this.

        The result is the process that was last on average over the steps since the previous call,
        which are fewer than `train.log_every` after a resume.
        """
        own = self._clock.seconds('data_wait', 'other') - self._own_seconds
        # Other processes answer only after the step in flight: this wait counts as productive.
        self._clock.begin('productive')
        values = slowest(own / self._steps)
        self._steps = 0
        self._clock.begin('other')
        self._own_seconds = self._clock.seconds('data_wait', 'other')
        return values
