"""A run that hangs, in a process of its own: whatever it waits for, it tells where and ends; one
that gets on is left alone.
"""

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megajax.runtime.run.watchdog import GRACE, LOG, STALLED, Watchdog

pytestmark = pytest.mark.faults

LIMIT = 1.0
PROGRAM = """
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path
from megajax.runtime.run.watchdog import Watchdog

def wait_for_ever():
    while True:
        time.sleep(1)

def hold_the_gil():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # no signal ends this

def sleep_in_c():
    ctypes.PyDLL(None).sleep(60)  # a signal does end this
    watchdog.beat('too late')
    print('went on')

threading.Thread(target=wait_for_ever, daemon=True, name='other').start()
limits = {'start': 60.0, 'compile': 60.0, 'step': float(sys.argv[2])}
with Watchdog(Path(sys.argv[1]), limits) as watchdog:
    print('started', flush=True)
    exec(sys.argv[3])
print('ended well')
"""


def start(folder: Path, code: str, *, before: str = '') -> subprocess.Popen[str]:
    command = [sys.executable, '-c', before + PROGRAM, str(folder), str(LIMIT), code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == 'started\n'
    return process


@pytest.mark.parametrize('hang', ['wait_for_ever', 'hold_the_gil', 'sleep_in_c'])
def test_a_run_that_hangs_tells_where_and_ends_with_124(tmp_path: Path, hang: str) -> None:
    process = start(tmp_path, f"watchdog.beat('step 13'); watchdog.beat('step 14'); {hang}()")
    begin = time.monotonic()
    said, wrong = process.communicate(timeout=30)
    assert (process.returncode, said) == (STALLED, '')
    assert LIMIT < time.monotonic() - begin < LIMIT + 2 * GRACE
    log = (tmp_path / LOG).read_text()
    half, end = (
        f'pid {process.pid} on host {platform.node()}',
        'watchdog: no progress for 1 s in phase',
    )
    assert wrong.startswith(
        f"watchdog: process 0 of 1 ({half}) has been in phase 'step 14' for 0.5 s and ends at "
        f'1 s\n{end}'
    )
    assert log[log.index(end) :] == wrong[wrong.index(end) :]
    assert log.count(f"({half}) has been in phase 'step 14'") == 1
    assert log.count('Thread 0x') + log.count('thread 0x') >= 2
    assert f'in {hang}' in log


def test_a_hang_in_another_thread_is_shown_too(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        "watchdog.beat('data'); threading.Thread(target=hold_the_gil).start(); wait_for_ever()",
    )
    _, wrong = process.communicate(timeout=30)
    assert process.returncode == STALLED
    assert 'in hold_the_gil' in wrong


def test_a_run_that_gets_on_is_left_alone(tmp_path: Path) -> None:
    code = "for step in range(30): watchdog.beat(f'step {step}'); time.sleep(0.1)"
    assert finish(start(tmp_path, code)) == (0, 'ended well\n', '')
    assert not (tmp_path / LOG).exists()


def test_the_limit_of_a_patient_phase_is_longer_and_ends_with_it(tmp_path: Path) -> None:
    process = start(
        tmp_path,
        (
            "watchdog.beat('compiling', 'compile'); time.sleep(2); watchdog.beat('step 1'); "
            'wait_for_ever()'
        ),
    )
    code, _, wrong = finish(process)
    assert (code, "in phase 'step 1'" in wrong) == (STALLED, True)


def test_an_error_of_the_run_stays_what_it_is(tmp_path: Path) -> None:
    code, _, wrong = finish(start(tmp_path, "watchdog.beat('step 1'); 1 / 0"))
    assert (code, 'ZeroDivisionError' in wrong, 'watchdog:' in wrong) == (1, True, False)


def test_without_its_directory_a_run_that_hangs_tells_the_terminal(tmp_path: Path) -> None:
    code, _, wrong = finish(start(tmp_path / 'gone', "watchdog.beat('saving'); hold_the_gil()"))
    assert (code, 'in hold_the_gil' in wrong, 'cannot be written: No such file' in wrong) == (
        STALLED,
        True,
        True,
    )


def test_killed_a_run_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start(tmp_path, 'print(watchdog._reporter.pid, flush=True); wait_for_ever()')
    assert process.stdout is not None
    reporter = Path('/proc', process.stdout.readline().strip())
    assert reporter.exists()
    process.kill()
    assert (
        finish(process)[0] == -9
    )  # its output ends once the reporter, which inherits stderr, has ended
    deadline = time.monotonic() + 5
    while reporter.exists() and 'State:\tZ' not in (reporter / 'status').read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_beat_is_cheap(tmp_path: Path) -> None:
    program = """
times = []
for step in range(3000):
    begin = time.perf_counter()
    watchdog.beat(f'step {step}')
    times.append(time.perf_counter() - begin)
print(sorted(times)[1500])
"""
    code, said, _ = finish(start(tmp_path, program))
    assert code == 0
    assert float(said.splitlines()[0]) < 50e-6


def test_without_a_limit_there_is_no_watchdog() -> None:
    with Watchdog(Path('no such folder'), None) as watchdog:
        watchdog.beat('step 1')


def test_without_stderr_the_log_is_written(tmp_path: Path) -> None:
    process = start(
        tmp_path, "watchdog.beat('data'); hold_the_gil()", before='import os; os.close(2)'
    )
    assert finish(process)[0] == STALLED
    assert 'in hold_the_gil' in (tmp_path / LOG).read_text()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    said, wrong = process.communicate(timeout=30)
    return process.returncode, said, wrong
