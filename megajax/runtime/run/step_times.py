"""Measure steps whose devices still compute while the host waits for the next batch."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, NamedTuple

import jax

from megajax.core.train.step import Metrics
from megajax.runtime.run.clock import Clock

POLL = 1e-3  # seconds between two looks at a step that is running


class Dispatched(NamedTuple):
    """A step that was dispatched to the devices; its metrics have not been read yet."""

    step: int
    metrics: Metrics
    start: float  # clock time in seconds, before the batch was read
    after_batch: float  # clock time in seconds, after the batch was read
    replay: float = 0.0  # seconds for which it was repeated and compared
    # Clock time in seconds at which the previous step ended, if it did so before `after_batch`.
    previous_end: float = math.inf

    def values(self) -> dict[str, float]:
        """Wait for the step to end, and return its metrics."""
        return {name: float(value) for name, value in jax.device_get(self.metrics).items()}


class Times(NamedTuple):
    """The seconds of a step, without its replay, and those for which it waited for its batch."""

    total: float
    data_wait: float


class StepTimes:
    """The times of the steps of a run; those that the devices spend in a step count as productive.

    A step begins with the wait for its batch, or when the previous step ends, whichever is later.
    """

    def __init__(self, clock: Clock):
        self._clock = clock
        self._last_end = 0.0  # clock time in seconds at the end of the last step

    def complete(
        self, done: Dispatched, end: float, ahead: Dispatched | None, *, taken: bool
    ) -> Times:
        """Return the times of a step whose metrics were read at `end`; each step is passed once.

        `ahead` is the next step, if that was dispatched before. The seconds of a step that was not
        taken are moved to `lost`.
        """
        if ahead is not None:
            end = min(end, ahead.previous_end)
            overlap = max(0.0, min(end, ahead.after_batch) - ahead.start)
            self._clock.move(overlap, 'data_wait', 'productive')
        start, self._last_end = max(done.start, self._last_end), end
        times = Times(end - start - done.replay, max(0.0, done.after_batch - start))
        if not taken:
            self._clock.lose(times.total - times.data_wait)
        return times


@contextmanager
def noting_end(metrics: Metrics | None) -> Iterator[list[float]]:
    """Yield a list, to which the clock time is added when the step of `metrics` ends.

    A step that ends after the block is not noted.
    """
    ends, left = list[float](), Event()
    if metrics is None:
        yield ends
        return
    loss: Any = metrics['loss']  # the type of jax's arrays lacks `is_ready`

    def look() -> None:
        while not loss.is_ready():
            if left.wait(POLL):
                return
        ends.append(time.perf_counter())

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield ends
    finally:
        left.set()
        thread.join()
