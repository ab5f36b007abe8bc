"""A run that no longer gets anywhere says where it stands, and ends.

A thread of Python's cannot do this: where the main thread holds the GIL in C and never returns, no other runs. So the kernel keeps the
time. At the limit a timer of its sends a signal, whose handler is faulthandler's: C that writes the stacks of all threads into a pipe. At
its other end waits a process of the standard library alone, this file, which writes them down with the phase. A second timer then
starts a thread of the C library's at `_exit`, with the exit code as its argument. Imports no jax.
"""

import ctypes
import faulthandler
import math
import mmap
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

STALLED = 124  # the exit code, that of `timeout`
LOG = 'watchdog.log'
LONGEST = 1e9  # seconds that a timer can be set to, and more than any run has
PATIENT = 3600.0  # seconds for a phase without boundaries of its own, such as a compilation
# Seconds between the stacks and the end. Processes that wait for each other stop at about the same time, and end with the first:
# this gives each the time to tell where it stood.
GRACE = 3.0
QUIET = 1.0  # seconds without another line of the stacks; then they are complete
PAGE = 256  # bytes that both processes see: whether the phase is patient, and its name
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
    """A timer of the kernel's that does what `event` says, once, `extra` seconds after the limit of a phase."""

    def __init__(self, libc: ctypes.CDLL, event: _Event, limits: tuple[float, float], extra: float):
        self._timer, self._set, self._delete = ctypes.c_void_p(), libc.timer_settime, libc.timer_delete
        self._set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._times = [_Time(0, 0, *divmod(math.ceil(1e9 * (min(limit, LONGEST) + extra)), 10**9)) for limit in limits]
        self._never, self._left = _Time(), _Time()
        if libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            number = ctypes.get_errno()
            raise OSError(number, f'timer_create: {os.strerror(number)}')
        self.start(patient=True)

    def start(self, *, patient: bool) -> bool:
        """Begin anew; False if it had gone off, which the kernel decides, so that nothing comes in between."""
        return self._begin(self._times[patient])

    def delete(self) -> bool:
        """It will not go off; False if it had."""
        in_time = self._begin(self._never)
        self._delete(self._timer)
        return in_time

    def _begin(self, limit: _Time) -> bool:
        self._set(self._timer, 0, ctypes.addressof(limit), ctypes.addressof(self._left))
        return bool(self._left.seconds or self._left.nanoseconds)


class Watchdog:
    """A context in which `seconds` without a `beat` write the phase and all stacks to stderr and `folder`/watchdog.log, and exit with 124.

    None for `seconds` turns it off. Entering raises ConfigError where the kernel is not Linux.
    """

    def __init__(self, folder: Path, seconds: float | None):
        self.folder, self.seconds = folder, seconds
        self._timers: tuple[_Timer, _Timer] | tuple[()] = ()

    def __enter__(self) -> Self:
        if self.seconds is not None:
            if sys.platform != 'linux':
                from megajax.config.errors import ConfigError  # here: the reporter runs this file outside the package

                raise ConfigError(
                    f'run.watchdog_seconds={self.seconds:g} needs the timers of Linux, and this is {sys.platform}: leave it out'
                )
            limits = self.seconds, max(self.seconds, PATIENT)
            self._start_reporter(limits)
            self._make_timers(limits)
            self.beat('starting', patient=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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

    def beat(self, phase: str, *, patient: bool = False) -> None:
        """The run got on, and `phase` begins, with a limit of its own; `patient`: of at least an hour, since nothing beats inside it."""
        if self._timers:
            tell, leave = self._timers
            if not tell.start(patient=patient):
                self._wait_for_the_end()
            leave.start(patient=patient)
            self._page[:] = bytes([patient]) + phase.encode()[: PAGE - 1].ljust(PAGE - 1, b'\0')

    def _wait_for_the_end(self) -> NoReturn:
        # The run went on too late: it is being written that it ends.
        time.sleep(2 * GRACE)
        os._exit(STALLED)

    def _start_reporter(self, limits: tuple[float, float]) -> None:
        shared, (stacks, self._pipe) = os.memfd_create('watchdog'), os.pipe()
        os.truncate(shared, PAGE)
        self._page = mmap.mmap(shared, PAGE)
        log = self.folder.absolute() / LOG
        command = [sys.executable, '-I', '-S', __file__, *map(str, (shared, stacks, os.getpid(), log, *limits))]
        # Out of reach of Ctrl-C: the run may go on for a while after that.
        self._reporter = subprocess.Popen(
            command, pass_fds=(shared, stacks), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        os.close(shared)
        os.close(stacks)
        faulthandler.register(signal.SIGRTMAX, file=self._pipe, all_threads=True)

    def _make_timers(self, limits: tuple[float, float]) -> None:
        libc = _libc()
        tell = _Event(None, signal.SIGRTMAX, SIGEV_SIGNAL)
        # The function gets the value in the register of a first argument, whether it is declared as a union, a pointer or an int.
        leave = _Event(STALLED, 0, SIGEV_THREAD, ctypes.cast(libc._exit, ctypes.c_void_p))
        self._timers = _Timer(libc, tell, limits, 0), _Timer(libc, leave, limits, GRACE)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, 'timer_create') else ctypes.CDLL('librt.so.1', use_errno=True)  # its home before glibc 2.34


def report(shared: int, stacks: int, pid: int, log: str, limits: tuple[float, ...]) -> None:
    """Write the stacks of process `pid` to stderr and `log` when they come; none come from a run that ends well."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # as long as the run lives, so does this
    text = os.read(stacks, mmap.PAGESIZE)
    if not text:
        return
    page = os.pread(shared, PAGE, 0)
    while select.select([stacks], [], [], QUIET)[0] and (more := os.read(stacks, mmap.PAGESIZE)):
        text += more
    phase, when = page[1:].rstrip(b'\0').decode(errors='replace'), time.strftime('%FT%TZ', time.gmtime())
    line = (
        f'watchdog: no progress for {limits[page[0]]:g} s in phase {phase!r}: pid {pid} on host {platform.node()} ends, {when}; its stacks:'
    )
    text = f'{line}\n'.encode() + text
    # At the same time: the file system, or who reads stderr, may be what the run waits for.
    for write in (lambda: _write(2, text), lambda: _append(log, text)):
        threading.Thread(target=write).start()


def _append(path: str, text: bytes) -> None:
    try:
        _write(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640), text)
    except OSError as error:
        _write(2, f'watchdog: {path} cannot be written: {error.strerror}\n'.encode())


def _write(file: int, text: bytes) -> None:
    while text:
        text = text[os.write(file, text) :]


if __name__ == '__main__':
    _shared, _stacks, _pid, _log, *_limits = sys.argv[1:]
    report(int(_shared), int(_stacks), int(_pid), _log, tuple(map(float, _limits)))
