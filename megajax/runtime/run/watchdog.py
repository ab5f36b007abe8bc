"""The watchdog: a run that makes no progress reports its phase and stacks, and ends.

A Python thread cannot do this: while the main thread is in C code, holds the GIL and never returns,
no other thread runs. The kernel therefore measures the time. At the limit, a kernel timer sends a
signal to faulthandler, which writes the stacks of all threads into a pipe, in C. A separate process
at the other end of the pipe (`stall_report.py`) logs them with the phase. Then a second timer makes
the C library start a thread that calls `_exit` with the exit code. Imports no jax.
"""

import ctypes
import faulthandler
import fcntl
import math
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, Self

from megajax.base.errors import ConfigError
from megajax.runtime.run import stall_report
from megajax.runtime.run.stall_report import PAGE, Place

STALLED = 124  # the exit code, the same as `timeout`'s
LOG = 'watchdog.log'
MAX_TIMER_SECONDS = 1e9  # maximum seconds for a timer; longer than any run
# Seconds between the stacks and the end. Processes that wait for each other stall at about the same
# time, and all end when the first one ends. This gives each of them the time to report its phase
# and stacks.
GRACE = 3.0
CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGEV_THREAD = 1, 0, 2  # values on Linux


class _Event(ctypes.Structure):
    """`struct sigevent` of 64-bit Linux."""

    _fields_ = (
        ('value', ctypes.c_void_p),
        ('signal', ctypes.c_int),
        ('notify', ctypes.c_int),
        ('function', ctypes.c_void_p),
        ('attributes', ctypes.c_void_p),
        ('rest', ctypes.c_char * 32),
    )


class _Time(ctypes.Structure):
    """`struct itimerspec`; both members of the interval are zero for a timer that fires once."""

    _fields_ = (
        ('interval_seconds', ctypes.c_long),
        ('interval_nanoseconds', ctypes.c_long),
        ('seconds', ctypes.c_long),
        ('nanoseconds', ctypes.c_long),
    )


class _Timer:
    """A kernel timer that triggers `event` once, `extra` seconds after a limit."""

    def __init__(self, libc: ctypes.CDLL, event: _Event, limit: float, extra: float):
        self._timer = ctypes.c_void_p()
        self._set, self._delete = libc.timer_settime, libc.timer_delete
        self._set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._extra, self._time, self._left = extra, _Time(), _Time()
        if libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            number = ctypes.get_errno()
            raise OSError(number, f'timer_create: {os.strerror(number)}')
        self.start(limit)

    def start(self, limit: float) -> bool:
        """Restart the timer; return False if it had already fired.

        The kernel decides this atomically, so the timer cannot fire in between.
        """
        return self._begin(math.ceil(1e9 * (min(limit, MAX_TIMER_SECONDS) + self._extra)))

    def delete(self) -> bool:
        """Delete the timer before it fires; return False if it had already fired."""
        in_time = self._begin(0)
        self._delete(self._timer)
        return in_time

    def _begin(self, nanoseconds: int) -> bool:
        self._time.seconds, self._time.nanoseconds = divmod(nanoseconds, 10**9)
        self._set(self._timer, 0, ctypes.addressof(self._time), ctypes.addressof(self._left))
        return bool(self._left.seconds or self._left.nanoseconds)


class Watchdog:
    """A context in which a phase that exceeds its limit ends the process with exit code 124.

    The phase and all stacks are written to stderr and, if there is a `folder`, to its watchdog.log,
    and so is a warning when half of the limit has passed. `limits` gives seconds by kind of phase
    (`watchdog_limits.py`); None turns the watchdog off. `index` is the number of this process among
    `count` processes. Entering raises ConfigError unless the kernel is Linux.
    """

    def __init__(
        self,
        folder: Path | None,
        limits: Mapping[str, float] | None,
        *,
        index: int = 0,
        count: int = 1,
    ):
        self.folder, self.limits, self.index, self.count = folder, dict(limits or {}), index, count
        self.phase, self.since = 'starting', time.monotonic()
        self._timers: tuple[_Timer, _Timer] | tuple[()] = ()
        self._beats = 0

    def __enter__(self) -> Self:
        if self.limits:
            if sys.platform != 'linux':
                raise ConfigError(
                    'run.watchdog_seconds needs Linux timers, '
                    f'but this is {sys.platform}: set it to null'
                )
            self._shared = _above_stderr(os.memfd_create('watchdog'))
            os.truncate(self._shared, PAGE)
            self._page = mmap.mmap(self._shared, PAGE)
            self._place('start')
            self._start_reporter()
            self._make_timers(self.limits['start'])
        return self

    def __exit__(self, *_: object) -> None:
        if self._timers:
            tell, leave = self._timers
            if not tell.delete():
                self._wait_for_the_end()
            leave.delete()
            self._timers = ()
            faulthandler.unregister(signal.SIGRTMAX)
            # Otherwise the reporter would wait for processes forked from this one, which have the
            # pipe open.
            self._reporter.kill()
            self._reporter.wait()
            os.close(self._pipe)
            self._page.close()

    def beat(self, phase: str, kind: str = 'step') -> None:
        """Note progress: `phase` begins, with the limit of its kind."""
        self.phase, self.since = phase, time.monotonic()
        if self._timers:
            tell, leave = self._timers
            if not tell.start(self.limits[kind]):
                self._wait_for_the_end()
            leave.start(self.limits[kind])
            self._place(kind)

    def allow(self, kind: str, seconds: float) -> None:
        """Raise the limit of a kind of phase to `seconds`, if it is lower."""
        if self.limits:
            self.limits[kind] = max(self.limits[kind], seconds)

    def _place(self, kind: str) -> None:
        self._beats += 1
        place = Place(
            self.limits[kind], self._beats, self.since, self.index, self.count, self.phase
        )
        self._page[:] = place.encode()

    def _wait_for_the_end(self) -> NoReturn:
        # The run has continued too late; the report of its stall is already being written.
        time.sleep(2 * GRACE)
        os._exit(STALLED)

    def _start_reporter(self) -> None:
        stacks, self._pipe = map(_above_stderr, os.pipe())
        log = self.folder.absolute() / LOG if self.folder else ''
        command = [
            sys.executable,
            '-I',
            '-S',
            stall_report.__file__,
            *map(str, (self._shared, stacks, os.getpid(), log)),
        ]
        # In a new session, which Ctrl-C does not reach: the run may continue for a while after it.
        self._reporter = subprocess.Popen(
            command,
            pass_fds=(self._shared, stacks),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(self._shared)
        os.close(stacks)
        faulthandler.register(signal.SIGRTMAX, file=self._pipe, all_threads=True)

    def _make_timers(self, limit: float) -> None:
        libc = _libc()
        tell = _Event(None, signal.SIGRTMAX, SIGEV_SIGNAL)
        # The function receives the value in the register of its first argument, whether that
        # argument is declared as a union, a pointer or an int.
        leave = _Event(STALLED, 0, SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p))
        self._timers = _Timer(libc, tell, limit, 0), _Timer(libc, leave, limit, GRACE)


def _above_stderr(file: int) -> int:
    """Return the file under a descriptor above 2.

    In a run that was started without stderr, a new file could otherwise be mistaken for it.
    """
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(file)
    return number


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    # Before glibc 2.34, the timers were in librt.
    return libc if hasattr(libc, 'timer_create') else ctypes.CDLL('librt.so.1', use_errno=True)
