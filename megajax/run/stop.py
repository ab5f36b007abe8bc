"""Leaving when asked to: a signal or a time limit is honoured at the next safe point, by all processes at the same one."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

from megajax.config import StopRequested
from megajax.processes.signals import STOPS, Patience, drop_lost_outputs, take_stops


class StopWatch:
    """A context in which SIGTERM, SIGINT, SIGHUP, SIGUSR1 and the end of `max_minutes` make `check` raise.

    Another SIGINT ends the process at once; any other signal after the first is the first again.
    """

    def __init__(self, max_minutes: float | None):
        self.progress: Callable[[], str] | None = (
            None  # says what will be saved, once there is a run to save
        )
        self._alone = (
            not jax.distributed.is_initialized()
        )  # asked like this, jax does not start its devices
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._reason: str | None = None
        self._checks = 0
        self._patience = Patience()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        # With other processes jax has taken SIGTERM, to tell all of them where to stop; a handler of ours would replace that.
        self._before = take_stops(
            self._handle, [number for number in STOPS if self._alone or number != signal.SIGTERM]
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """A safe point: raise StopRequested if the run is to stop. All processes come here equally often."""
        if (
            self._deadline is not None
            and time.monotonic() > self._deadline
            and jax.process_index() == 0
        ):
            self._ask('run.max_minutes')
        self._checks += 1
        if (
            self._reason
            if self._alone
            else multihost_utils.reached_preemption_sync_point(self._checks)
        ):
            drop_lost_outputs()  # again: what reads them may have ended after this process got the signal
            raise StopRequested(self._reason or 'a signal')

    def _handle(self, number: int, _: FrameType | None) -> None:
        match self._patience.meaning(number):
            case 'first':
                drop_lost_outputs()
                self._ask(signal.Signals(number).name)
                self._announce(signal.Signals(number).name)
            case 'insists':
                os._exit(
                    StopRequested.exit_code
                )  # a checkpoint is on disk as a whole or not at all

    def _announce(self, name: str) -> None:
        if self.progress is not None:
            line = f'{name}: {self.progress()}; SIGINT (Ctrl-C) from now on leaves at once, with the last checkpoint'
            with suppress(OSError):
                os.write(
                    2, f'{line}\n'.encode()
                )  # not `print`: the signal may have come in the middle of one

    def _ask(self, reason: str) -> None:
        if self._reason is None and not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)  # which jax tells the others
        self._reason = self._reason or reason
