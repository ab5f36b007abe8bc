"""Stop on request: all processes react to a signal or a time limit at the same safe point."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from megajax.core.config import StopRequested
from megajax.runtime.processes.signals import STOPS, Patience, drop_lost_outputs, take_stops


class StopWatch:
    """A context in which a signal or the end of `max_minutes` makes `check` raise.

    The signals are SIGTERM, SIGINT, SIGHUP and SIGUSR1. A further SIGINT ends the process at once;
    any other repeated signal changes nothing.
    """

    def __init__(self, max_minutes: float | None):
        # Describes what will be saved, once there is a run to save.
        self.progress: Callable[[], str] | None = None
        # `is_initialized` does not start the devices.
        self._alone = not jax.distributed.is_initialized()
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._reason: str | None = None
        self._checks = 0
        self._is_reached = False  # whether the processes have reached the point that jax chose
        self._patience = Patience()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # With several processes, jax handles SIGTERM to make all of them stop at the same step; a
        # handler here would replace jax's.
        self._before = take_stops(
            self._handle, [number for number in STOPS if self._alone or number != signal.SIGTERM]
        )
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise StopRequested if the run is to stop; after that, each further call raises it again.

        Each call is a safe point; all processes must call this the same number of times.
        """
        if (
            self._deadline is not None
            and time.monotonic() > self._deadline
            and jax.process_index() == 0
        ):
            self._ask('run.max_minutes')
        self._checks += 1
        if not self._alone and not self._is_reached:  # jax answers yes only once
            self._is_reached = multihost_utils.reached_preemption_sync_point(self._checks)
        if self._reason if self._alone else self._is_reached:
            drop_lost_outputs()  # again, because the reader may have ended after the signal came
            raise StopRequested(self._reason or 'a signal')

    def _handle(self, number: int, _: FrameType | None) -> None:
        match self._patience.meaning(number):
            case 'first':
                drop_lost_outputs()
                self._ask(signal.Signals(number).name)
                self._announce(signal.Signals(number).name)
            case 'insists':
                os._exit(StopRequested.exit_code)  # a checkpoint on disk is complete or absent

    def _announce(self, name: str) -> None:
        if self.progress is not None:
            insist = 'a further SIGINT (Ctrl-C) exits at once, with only the last checkpoint'
            line = f'{name}: {self.progress()}; {insist}\n'
            # not `print`, because the signal may have come in the middle of one
            with suppress(OSError):
                os.write(2, line.encode())

    def _ask(self, reason: str) -> None:
        if self._reason is None and not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)  # jax forwards it to the other processes
        self._reason = self._reason or reason
