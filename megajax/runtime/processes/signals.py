"""Handlers for the signals that ask a run to save and exit. Imports no jax.

They are installed as soon as a process starts.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Literal

from megajax.runtime.processes.peers import RETRY

# SIGTERM: schedulers and `kill`. SIGINT: Ctrl-C. SIGHUP: the terminal was closed. SIGUSR1: many
# batch templates send it before the time limit (`#SBATCH --signal=USR1@300`).
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A SIGINT within this many seconds of the first signal counts as the same signal, because wrappers
# forward the signals that they receive.
SAME_SECONDS = 1.0

# SIGUSR2: a user asks for the run's status, and the run continues.
TELL = signal.SIGUSR2

Handler = Callable[[int, FrameType | None], Any]


def take_stops(
    handler: Handler, numbers: Sequence[signal.Signals] = STOPS
) -> dict[signal.Signals, Any]:
    """Install `handler` and return the previous handlers.

    Signals that this process ignores because of `nohup` or `trap ''` stay ignored, except SIGTERM
    and SIGINT. Outside the main thread, where Python installs no handlers, there are none.
    """
    if not _in_main_thread():
        return {}
    taken = [
        number
        for number in numbers
        if number in (signal.SIGTERM, signal.SIGINT)
        or signal.getsignal(number) is not signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in taken}


def leave_when_asked() -> None:
    """Exit with code 75 on any of these signals while there is no run to save."""
    take_stops(lambda *_: os._exit(RETRY))
    signal.signal(TELL, lambda *_: _tell('starting'))


@contextmanager
def telling(describe: Callable[[], str]) -> Iterator[None]:
    """Print the result of `describe` on standard error whenever SIGUSR2 comes.

    Python handles the signal between two operations of the main thread, so if the main thread waits
    for the devices, the line is printed only after that. Outside the main thread, Python installs
    no handlers, and nothing is printed.
    """
    if not _in_main_thread():
        yield
        return
    before = signal.signal(TELL, lambda *_: _tell(describe()))
    try:
        yield
    finally:
        signal.signal(TELL, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _tell(text: str) -> None:
    with suppress(OSError):  # not `print`, because the signal may have come in the middle of one
        os.write(2, f'{TELL.name}: {text}\n'.encode())


class Patience:
    """Distinguishes a signal that asks the run to stop from a signal that insists.

    Schedulers may send SIGTERM twice within milliseconds, which counts as one signal.
    """

    def __init__(self) -> None:
        self._asked: float | None = None  # time at which the first signal came

    def meaning(self, number: int) -> Literal['first', 'again', 'insists']:
        """Return what this signal means, given the earlier ones.

        Only a person's SIGINT insists, and only later than a second after the first signal.
        """
        now = time.monotonic()
        if self._asked is None:
            self._asked = now
            return 'first'
        return (
            'insists' if number == signal.SIGINT and now - self._asked > SAME_SECONDS else 'again'
        )


def drop_lost_outputs() -> None:
    """Redirect stdout and stderr to /dev/null if the terminal or the pipe's reader is gone.

    Writing to a closed output is an error, which would end the run before it has saved.
    """
    for output in (1, 2):
        poll = select.poll()
        poll.register(output, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)
