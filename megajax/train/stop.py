"""Leaving when asked to: a signal or a time limit is honoured at the next safe point, by all processes at the same one."""

import os
import signal
import time
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

from megajax.config import StopRequested


class StopWatch:
    """A context in which SIGTERM, SIGINT and the end of `max_minutes` make `check` raise; a second signal ends the process at once."""

    def __init__(self, max_minutes: float | None):
        self._alone = not jax.distributed.is_initialized()  # asked like this, jax does not start its devices
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._reason: str | None = None
        self._checks = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # With other processes jax has taken SIGTERM, to tell all of them where to stop; a handler of ours would replace that.
        signals = [signal.SIGINT, signal.SIGTERM] if self._alone else [signal.SIGINT]
        self._before = {number: signal.signal(number, self._handle) for number in signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """A safe point: raise StopRequested if the run is to stop. All processes come here equally often."""
        if self._deadline is not None and time.monotonic() > self._deadline and jax.process_index() == 0:
            self._ask('run.max_minutes')
        self._checks += 1
        if self._alone:
            if self._reason:
                raise StopRequested(self._reason)
        elif multihost_utils.reached_preemption_sync_point(self._checks):
            raise StopRequested(self._reason or 'a signal')

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._reason:
            os._exit(StopRequested.exit_code)  # what is on disk stays as it is: a checkpoint is there as a whole or not at all
        self._ask(signal.Signals(number).name)

    def _ask(self, reason: str) -> None:
        if self._reason is None and not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)  # which jax tells the others
        self._reason = reason
