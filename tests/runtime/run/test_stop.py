"""A run that is asked to stop stops at its next safe point, and says at once what it will do."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megajax.core.config import StopRequested
from megajax.runtime.processes.signals import STOPS
from megajax.runtime.run.stop import StopWatch

# A process that jax counts as one of several: it finds its safe point through the coordinator.
OF_SEVERAL = """
import contextlib, os, signal, socket, time
import jax
with socket.create_server(('127.0.0.1', 0)) as free:
    address = f'127.0.0.1:{free.getsockname()[1]}'
jax.distributed.initialize(address, 1, 0)
from megajax.core.config import StopRequested
from megajax.runtime.run.stop import StopWatch
with StopWatch(None) as stop:
    stop.check()
    os.kill(os.getpid(), signal.SIGTERM)
    with contextlib.suppress(StopRequested):
        while True:
            time.sleep(0.01)
            stop.check()
    for _ in range(3):
        try:
            stop.check()
        except StopRequested:
            print('raised again')
"""


@pytest.mark.parametrize('number', STOPS)
def test_a_signal_is_honoured_at_the_next_safe_point(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopWatch(None) as stop:
        stop.progress = lambda: 'saving step 7'
        stop.check()
        os.kill(os.getpid(), number)
        said = capfd.readouterr().err
        assert (
            said == f'{number.name}: saving step 7; '
            'a further SIGINT (Ctrl-C) exits at once, with only the last checkpoint\n'
        )
        with pytest.raises(StopRequested, match=f'^{number.name}$'):
            stop.check()


def test_a_second_signal_is_the_first_again(capfd: pytest.CaptureFixture[str]) -> None:
    with StopWatch(None) as stop:
        stop.progress = lambda: 'saving'
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert len(capfd.readouterr().err.splitlines()) == 1
        with pytest.raises(StopRequested, match=r'^SIGTERM$'):
            stop.check()


def test_before_there_is_anything_to_save_nothing_is_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopWatch(None) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            stop.check()
    assert capfd.readouterr().err == ''


def test_the_time_limit_is_a_reason_too() -> None:
    with StopWatch(1.0) as stop:
        stop.check()
    with StopWatch(1e-6) as stop:
        time.sleep(0.001)
        with pytest.raises(StopRequested, match=r'^run\.max_minutes$'):
            stop.check()


def test_afterwards_the_handlers_are_those_of_before() -> None:
    before = [signal.getsignal(number) for number in STOPS]
    with StopWatch(None):
        assert all(signal.getsignal(number) not in before for number in STOPS)
    assert [signal.getsignal(number) for number in STOPS] == before


def test_a_safe_point_after_the_one_at_which_the_processes_stop_stops_them_too() -> None:
    """So a run does not evaluate before it saves, if its last step is due for an evaluation."""
    done = subprocess.run(
        [sys.executable, '-c', OF_SEVERAL], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.splitlines() == ['raised again'] * 3, done.stderr
