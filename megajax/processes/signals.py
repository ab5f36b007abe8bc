"""The signals that ask a run to save and leave, taken from the first moment of a process on. Imports no jax."""

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

from megajax.processes.peers import RETRY

# SIGTERM: schedulers and `kill`. SIGINT: Ctrl-C. SIGHUP: a terminal that was closed. SIGUSR1: what many batch templates send
# before a time limit (`#SBATCH --signal=USR1@300`).
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_SECONDS = 1.0  # after the first signal, in which another SIGINT is still the first: wrappers pass on what they got as well

Handler = Callable[[int, FrameType | None], Any]


def take_stops(
    handler: Handler, numbers: Sequence[signal.Signals] = STOPS
) -> dict[signal.Signals, Any]:
    """Install `handler` and return the handlers before it; what `nohup` or `trap ''` made this process ignore stays ignored."""
    taken = [
        number
        for number in numbers
        if number in (signal.SIGTERM, signal.SIGINT)
        or signal.getsignal(number) is not signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in taken}


def leave_when_asked() -> None:
    """Leave with 75 on any of these signals, as long as there is no run that could be saved."""
    take_stops(lambda *_: os._exit(RETRY))


class Patience:
    """Tells a signal that asks from one that insists: schedulers send SIGTERM twice within milliseconds, and mean one."""

    def __init__(self) -> None:
        self._asked: float | None = None  # when the first signal came

    def meaning(self, number: int) -> Literal['first', 'again', 'insists']:
        """What this signal means after those before it; only a person's SIGINT insists, and not in the same second."""
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            return 'first'
        return (
            'insists' if number == signal.SIGINT and now - self._asked > SAME_SECONDS else 'again'
        )


def drop_lost_outputs() -> None:
    """Send stdout and stderr to /dev/null where the terminal is closed, or the reader of the pipe has ended with it.

    Writing there is an error, which would end the run before it has saved.
    """
    for output in (1, 2):
        poll = select.poll()
        poll.register(output, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)
