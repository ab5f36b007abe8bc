"""`megajax launch`: start and watch the processes of one run on this machine. Imports no jax.

If one process fails, the others are ended, too.
"""

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from megajax.base.render.text import visible
from megajax.runtime.processes.environment import TOKEN
from megajax.runtime.processes.launch_plan import LaunchPlan
from megajax.runtime.processes.peers import LAUNCHED, RETRY, followed
from megajax.runtime.processes.signals import STOPS, TELL, Patience, drop_lost_outputs, take_stops
from megajax.runtime.processes.token import make_token

GRACE = 3.0  # seconds between SIGTERM and SIGKILL if a process has failed
# Seconds that the others get after the first process has ended on a forwarded signal: they may be
# saving.
GRACE_IF_ASKED = 30.0
LAST_LINES = 20  # number of last lines of a failed process's output that are printed again
POLL = 0.05  # seconds
# Signals from outside (a scheduler, or the kernel if it is out of memory) or from jax, which aborts
# when a peer is lost. A restart can fix the cause. Other signals, such as SIGSEGV, are crashes that
# would recur.
MENDABLE = (*STOPS, signal.SIGKILL, signal.SIGABRT)


def launch(plan: LaunchPlan, *, grace: float = GRACE) -> int:
    """Run the plan to its end; return 0, or the exit code of the process that failed first.

    That process may be on another host. If signal n ended it, the exit code is 75 if a restart can
    help (MENDABLE) or if a process was stopped (SIGSTOP), otherwise 128 + n. When one process
    fails, the others get SIGTERM and, after `grace` seconds, SIGKILL. The first signal that asks
    the run to stop is forwarded; a SIGINT more than a second later ends all processes with SIGKILL.
    """
    group = _Group(plan, grace)
    with group.passing_signals():
        group.start()
        return group.wait()


class _Group:
    """The running processes, by their index."""

    def __init__(self, plan: LaunchPlan, grace: float):
        self.plan, self.grace = plan, grace
        self.processes: list[subprocess.Popen[str]] = []
        self.tails: list[collections.deque[str]] = [
            collections.deque(maxlen=LAST_LINES) for _ in plan.variables
        ]
        self.readers: list[threading.Thread] = []
        # The first signal that asked the run to stop, and a later SIGINT that insisted on it.
        self.signals: list[signal.Signals] = []
        self.asked = 0  # number of processes to which the first signal was forwarded
        self.patience = Patience()
        self.total = plan.hosts * len(plan.variables)
        # indices of processes that were in state stopped when a peer failed
        self.stopped: list[int] = []

    @contextlib.contextmanager
    def passing_signals(self) -> Iterator[None]:
        before = take_stops(self._received)
        before[TELL] = signal.signal(TELL, lambda *_: self._send(TELL))
        try:
            yield
        finally:
            self._send(signal.SIGKILL)
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self) -> None:
        shared = {'PYTHONUNBUFFERED': '1', LAUNCHED: '1'}
        if self.plan.hosts == 1:  # with several hosts, the environment sets the token
            shared[TOKEN] = make_token()  # not part of the plan, because the plan is printed
        for variables in self.plan.variables:
            if self.signals:
                break
            self.processes.append(
                subprocess.Popen(
                    self.plan.command,
                    env={**os.environ, **variables, **shared},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors='replace',
                    # Ctrl-C reaches only this process, which forwards it once.
                    start_new_session=True,
                    preexec_fn=_in_the_child,
                )
            )
        # The threads start only now, because a fork while other threads run could hang.
        for index, process in enumerate(self.processes):
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                self.readers.append(
                    threading.Thread(
                        target=self._pass_on, args=(index, source, target), daemon=True
                    )
                )
        for reader in self.readers:
            reader.start()
        if self.signals:
            # Forward the signal to the process that was being started when it came.
            self._send(self.signals[0], self.asked)

    def wait(self) -> int:
        """Wait until all processes have ended; return the exit code of the run."""
        while not (failed := self._failed()) and self._running():
            time.sleep(POLL)
        if failed:
            failed = self._failed_first()
            self.stopped = [
                index
                for index, process in enumerate(self.processes)
                if process.poll() is None and _is_stopped(process.pid)
            ]
            self._end_others()
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join(timeout=1)
        return self._result(failed or self._failed())

    def _result(self, failed: list[int]) -> int:
        if not failed:
            # If there are fewer processes than planned, a signal came before all had started.
            return RETRY if len(self.processes) < len(self.plan.variables) else 0
        first = min(failed, key=lambda index: followed(self.processes[index].returncode) or 0)
        code = self.processes[first].returncode
        code = followed(code) or code
        drop_lost_outputs()
        if self.signals:
            print(f'launch: ended by {self.signals[0].name}', file=sys.stderr)
        # jax aborts if there is no heartbeat
        elif self.stopped and code in (RETRY, -signal.SIGABRT):
            which = ', '.join(str(self.plan.first + index) for index in self.stopped)
            print(
                f'launch: process {which} of {self.total} was stopped, '
                'for example by SIGSTOP, which ended the run',
                file=sys.stderr,
            )
            return RETRY
        else:
            print(
                f'launch: process {self.plan.first + first} of {self.total} failed with '
                f'{_describe(code)}; its last lines:',
                file=sys.stderr,
            )
            for line in self.tails[first]:
                print(f'    {visible(line)}', file=sys.stderr)
        return _exit_code(code)

    def _failed(self) -> list[int]:
        return [index for index, process in enumerate(self.processes) if process.poll()]

    def _failed_first(self) -> list[int]:
        # A code that was passed on means that a peer ended first, or will end within seconds: the
        # exit codes distinguish the cause from its consequences.
        deadline = time.monotonic() + self.grace
        while True:
            time.sleep(POLL)
            failed = self._failed()
            only_consequences = all(followed(self.processes[index].returncode) for index in failed)
            if (
                not only_consequences
                or self.signals
                or not self._running()
                or time.monotonic() > deadline
            ):
                return failed

    def _running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def _end_others(self) -> None:
        if not self.signals:
            self._send(signal.SIGTERM)
        deadline = time.monotonic() + (GRACE_IF_ASKED if self.signals else self.grace)
        while self._running() and time.monotonic() < deadline:
            time.sleep(POLL)
        self._send(signal.SIGKILL)

    def _received(self, number: int, frame: FrameType | None) -> None:
        match self.patience.meaning(number):
            case 'first':
                self.signals.append(signal.Signals(number))
                self.asked = len(self.processes)
                self._send(signal.Signals(number))
            case 'insists':
                self.signals.append(signal.Signals(number))
                self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals, first: int = 0) -> None:
        for process in self.processes[first:]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    # Each process leads a process group, which includes the workers that read its
                    # data.
                    if number == signal.SIGKILL:
                        os.killpg(process.pid, number)
                    else:
                        process.send_signal(number)

    def _pass_on(self, index: int, source: IO[str], target: IO[str]) -> None:
        for line in source:
            self.tails[index].append(line.rstrip('\n'))
            # This process's own output may be closed; the other processes continue.
            with contextlib.suppress(OSError, ValueError):
                end = '' if line.endswith('\n') else '\n'
                target.write(f'[{self.plan.first + index}] {line}{end}')
                target.flush()


def _exit_code(code: int) -> int:
    """Return the launch's exit code for a process's code, which is -n if signal n ended it."""
    if -code in MENDABLE:
        return RETRY
    return 128 - code if code < 0 else code


def _describe(code: int) -> str:
    if code >= 0:
        return f'exit code {code}'
    retried = f', and the launch exits with {RETRY}: start it again' if -code in MENDABLE else ''
    return f'signal {signal.Signals(-code).name} ({128 - code}){retried}'


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] in 'Tt'
    except OSError:  # the process has ended, or this is not Linux
        return False


def _in_the_child() -> None:
    """Have Linux kill this process when its launcher is killed; otherwise it would continue.

    Until the process can report its status, the signal that asks for the status must not end it.
    """
    signal.signal(TELL, signal.SIG_IGN)
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
