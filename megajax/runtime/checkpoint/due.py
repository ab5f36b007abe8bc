"""When a run saves its state: by steps, by minutes, and again after a save that failed."""

import time

from megajax.core.config import CheckpointConfig


class DueSave:
    """The step since which a save is due; None if none is due. It stays due until it begins."""

    def __init__(self, config: CheckpointConfig):
        self.config = config
        self.since: int | None = None
        self._begun = time.monotonic()  # the time at which the last save began
        self._is_retry = self._will_retry = False

    @property
    def is_late(self) -> bool:
        """Whether `checkpoint.minutes` have passed since the last save began."""
        minutes = self.config.minutes
        return minutes is not None and time.monotonic() - self._begun > 60 * minutes

    def reach(self, step: int, *, is_late: bool) -> int | None:
        """Return the step since which a save is due, now that the run is at `step`."""
        if self.since is None and (is_late or step % self.config.every == 0):
            self.since = step
        return self.since

    def begin(self) -> int | None:
        """Return the step since which the save that begins now is due; None if it is not due."""
        self._is_retry, self._will_retry, self._begun = self._will_retry, False, time.monotonic()
        since, self.since = self.since, None
        return since

    def fail(self, since: int) -> bool:
        """Make a save that has failed due again, unless it was tried twice; return whether it is.

        It was due since the step `since`.
        """
        self._will_retry = not self._is_retry
        self.since = since if self._will_retry else self.since
        return self._will_retry

    def forget(self) -> None:
        """Forget a save that is due: the run has left the steps since then."""
        self.since, self._will_retry = None, False
