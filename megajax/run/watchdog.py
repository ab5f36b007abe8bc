"""A run that no longer gets anywhere says where it stands, and ends.

A thread of Python's cannot do this: where the main thread holds the GIL in C and never returns, no other runs. So the kernel keeps the
time. At the limit a timer of its sends a signal, whose handler is faulthandler's: C that writes the stacks of all threads into a pipe. At
its other end waits a process of its own (`stall_report.py`), which writes them down with the phase. A second timer then starts a thread
of the C library's at `_exit`, with the exit code as its argument. Imports no jax.
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
from types import TracebackType
from typing import NoReturn, Self

from megajax.config.errors import ConfigError
from megajax.run import stall_report
from megajax.run.stall_report import PAGE, Place

STALLED = 124  # the exit code, that of `timeout`
LOG = 'watchdog.log'
LONGEST = 1e9  # seconds that a timer can be set to, and more than any run has
# Seconds between the stacks and the end. Processes that wait for each other stop at about the same time, and end with the first:
# this gives each the time to tell where it stood.
GRACE = 3.0
CLOCK_MONOTONIC, SIGEV_SIGNAL, SIGEV_THREAD = 1, 0, 2  # of Linux


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
    """`struct itimerspec`: of a timer that fires once, both members of the interval are zero."""

    _fields_ = (
        ('interval_seconds', ctypes.c_long),
        ('interval_nanoseconds', ctypes.c_long),
        ('seconds', ctypes.c_long),
        ('nanoseconds', ctypes.c_long),
    )


class _Timer:
    """A timer of the kernel's that does what `event` says, once, `extra` seconds after a limit."""

    def __init__(self, libc: ctypes.CDLL, event: _Event, limit: float, extra: float):
        self._timer, self._set, self._delete = (
            ctypes.c_void_p(),
            libc.timer_settime,
            libc.timer_delete,
        )
        self._set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._extra, self._time, self._left = extra, _Time(), _Time()
        if libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            number = ctypes.get_errno()
            raise OSError(number, f'timer_create: {os.strerror(number)}')
        self.start(limit)

    def start(self, limit: float) -> bool:
        """Begin anew; False if it had gone off, which the kernel decides, so that nothing comes in between."""
        return self._begin(math.ceil(1e9 * (min(limit, LONGEST) + self._extra)))

    def delete(self) -> bool:
        """It will not go off; False if it had."""
        in_time = self._begin(0)
        self._delete(self._timer)
        return in_time

    def _begin(self, nanoseconds: int) -> bool:
        self._time.seconds, self._time.nanoseconds = divmod(nanoseconds, 10**9)
        self._set(self._timer, 0, ctypes.addressof(self._time), ctypes.addressof(self._left))
        return bool(self._left.seconds or self._left.nanoseconds)


class Watchdog:
    """A context in which a phase that outlasts its limit ends the process with 124.

    The phase and all stacks go to stderr and `folder`/watchdog.log; when half of a limit has passed, one line does. `limits` are
    seconds by kind of phase (`limits.py`); None turns it off. Of `count` processes this is number `index`. Entering raises
    ConfigError where the kernel is not Linux.
    """

    def __init__(
        self, folder: Path, limits: Mapping[str, float] | None, *, index: int = 0, count: int = 1
    ):
        self.folder, self.limits, self.index, self.count = folder, dict(limits or {}), index, count
        self._timers: tuple[_Timer, _Timer] | tuple[()] = ()
        self._beats = 0

    def __enter__(self) -> Self:
        if self.limits:
            if sys.platform != 'linux':
                raise ConfigError(
                    f'run.watchdog_seconds needs the timers of Linux, and this is {sys.platform}: set it to null'
                )
            self._shared = _above_stderr(os.memfd_create('watchdog'))
            os.truncate(self._shared, PAGE)
            self._page = mmap.mmap(self._shared, PAGE)
            self._place('starting', 'start')
            self._start_reporter()
            self._make_timers(self.limits['start'])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timers:
            tell, leave = self._timers
            if not tell.delete():
                self._wait_for_the_end()
            leave.delete()
            self._timers = ()
            faulthandler.unregister(signal.SIGRTMAX)
            self._reporter.kill()  # it would wait for processes forked from this one, which have the pipe too
            self._reporter.wait()
            os.close(self._pipe)
            self._page.close()

    def beat(self, phase: str, kind: str = 'step') -> None:
        """The run got on, and `phase` begins, with the limit of its kind."""
        if self._timers:
            tell, leave = self._timers
            if not tell.start(self.limits[kind]):
                self._wait_for_the_end()
            leave.start(self.limits[kind])
            self._place(phase, kind)

    def allow(self, kind: str, seconds: float) -> None:
        """Raise the limit of a kind of phase to `seconds`, if it is less."""
        if self.limits:
            self.limits[kind] = max(self.limits[kind], seconds)

    def _place(self, phase: str, kind: str) -> None:
        self._beats += 1
        place = Place(
            self.limits[kind], self._beats, time.monotonic(), self.index, self.count, phase
        )
        self._page[:] = place.encode()

    def _wait_for_the_end(self) -> NoReturn:
        # The run went on too late: it is being written that it ends.
        time.sleep(2 * GRACE)
        os._exit(STALLED)

    def _start_reporter(self) -> None:
        stacks, self._pipe = map(_above_stderr, os.pipe())
        log = self.folder.absolute() / LOG
        command = [
            sys.executable,
            '-I',
            '-S',
            stall_report.__file__,
            *map(str, (self._shared, stacks, os.getpid(), log)),
        ]
        # Out of reach of Ctrl-C: the run may go on for a while after that.
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
        # The function gets the value in the register of a first argument, whether it is declared as a union, a pointer or an int.
        leave = _Event(STALLED, 0, SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p))
        self._timers = _Timer(libc, tell, limit, 0), _Timer(libc, leave, limit, GRACE)


def _above_stderr(file: int) -> int:
    """The same file under a number that nobody takes for stderr, as where a run was started without one."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(file)
    return number


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        libc if hasattr(libc, 'timer_create') else ctypes.CDLL('librt.so.1', use_errno=True)
    )  # its home before glibc 2.34
