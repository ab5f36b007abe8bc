"""A stall is told once, with the processes for which the others wait."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from megajax.runtime.run import stall_report
from megajax.runtime.run.stall_report import (
    MAX_SLEEP,
    NEAR,
    Place,
    _tell_half,
    _until_half,
    _waited_for,
    decode,
)


def place(**changes: object) -> Place:
    given = {'limit': 8.0, 'beat': 5, 'since': 100.0, 'index': 0, 'count': 3, 'phase': 'step 7'}
    return Place(**(given | changes))


def half(index: int, beat: int, count: int = 3) -> str:
    who = f'process {index} of {count} (pid {index} on host h) has been in phase'
    return f"watchdog: now {who} 'step {beat}' for 4 s and ends at 8 s [beat {beat}]\n"


def test_a_page_has_a_fixed_size_and_comes_back():
    assert decode(place(phase='a\tb').encode()) == place(phase='a\tb')
    assert len(place().encode()) == len(place(phase='x' * 999).encode()) == stall_report.PAGE


@pytest.mark.parametrize(
    ('now', 'told', 'seconds'),
    [(100.0, 4, 0.8), (103.5, 4, 0.5), (109.0, 4, 0.01), (109.0, 5, 0.8)],
)
def test_the_page_is_read_again_at_half_of_the_limit_at_the_latest(monkeypatch, now, told, seconds):
    monkeypatch.setattr('time.monotonic', lambda: now)
    assert _until_half(place(), told) == pytest.approx(seconds)
    assert _until_half(place(limit=1e6), told) == MAX_SLEEP


@pytest.mark.parametrize(('index', 'count', 'slept'), [(0, 3, [0.8]), (0, 1, [0]), (1, 3, [])])
def test_process_0_tells_the_terminal_after_the_others_have_written(
    tmp_path, monkeypatch, index, count, slept
):
    said, waits, log, page = [], [], tmp_path / 'log.txt', tmp_path / 'page'
    here = place(index=index, count=count)
    page.write_bytes(here.encode())
    monkeypatch.setattr('time.sleep', waits.append)
    monkeypatch.setattr(stall_report, '_say', said.append)
    shared = os.open(page, os.O_RDONLY)
    _tell_half(shared, here, 'pid 9 on host h', str(log), 0)
    (line,) = log.read_text().splitlines()
    assert line.endswith(' for 4 s and ends at 8 s [beat 5]')
    assert waits == slept
    assert len(said) == (index == 0)
    page.write_bytes(place(index=index, count=count, beat=6).encode())
    _tell_half(shared, here, 'pid 9 on host h', str(log), 0)  # the run has got on meanwhile
    assert len(said) == (index == 0)
    os.close(shared)


def test_the_processes_behind_are_named_from_the_lines_of_this_run(tmp_path: Path):
    log = tmp_path / 'log.txt'
    before = half(1, 2)
    log.write_text(before + half(1, 4) + half(2, 5))
    start, behind = len(before), 'the others wait for process 1 (pid 1 on host h), which is in'
    assert _waited_for(place(), str(log), start).startswith(behind)
    assert _waited_for(place(beat=4), str(log), start).startswith(behind)
    assert _waited_for(place(beat=3), str(log), start) == ''  # the others wait for this process
    log.write_text(half(1, 5) + half(2, 5))
    assert _waited_for(place(), str(log), 0) == ''
    assert _waited_for(place(), str(tmp_path / 'none'), 0) == ''


def said_at_the_limit(
    log: Path, monkeypatch: pytest.MonkeyPatch, *, after_half: str = ''
) -> list[bytes]:
    """What process 3 says; `after_half` is written to the log at half of the limit."""
    page, said = log.with_name('page'), list[bytes]()
    page.write_bytes(place(index=3, count=512, limit=0.4, since=time.monotonic()).encode())
    monkeypatch.setattr(stall_report, '_say', said.append)
    monkeypatch.setattr(stall_report, 'QUIET', 0.1)
    monkeypatch.setattr('signal.signal', lambda *_: None)  # only in a main thread
    shared, (stacks, pipe) = os.open(page, os.O_RDONLY), os.pipe()
    reporter = threading.Thread(
        target=stall_report.report, args=(shared, stacks, 3, str(log)), daemon=True
    )
    reporter.start()
    while '[beat 5]' not in log.read_text():
        time.sleep(0.01)
    with log.open('a') as file:
        file.write(after_half)
    os.write(pipe, b'stacks of this process\n')
    reporter.join(10)
    for file in (shared, stacks, pipe):
        os.close(file)
    return said


def test_at_the_limit_the_stacks_of_others_hide_no_process_that_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has grown by the stacks of many processes when the last one reports its own."""
    log = tmp_path / 'log.txt'
    log.write_text('an earlier run\n' * (NEAR // 10))
    stacks = 'a stack of another process\n' * (NEAR // 10)
    (said,) = said_at_the_limit(log, monkeypatch, after_half=half(7, 4, 512) + stacks)
    assert b'the others wait for process 7 (pid 7 on host h), which is in' in said


def test_the_stacks_do_not_wait_for_a_file_system_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(stall_report, '_waited_for', lambda *_: never.wait(20) and '')
    (tmp_path / 'log.txt').touch()
    (said,) = said_at_the_limit(tmp_path / 'log.txt', monkeypatch)
    assert said.endswith(b'stacks of this process\n')
    never.set()


def test_of_many_processes_that_are_behind_three_are_named(tmp_path: Path) -> None:
    log = tmp_path / 'log.txt'
    log.write_text(''.join(half(index, 4 if index < 300 else 5, 512) for index in range(512)))
    waited = _waited_for(place(index=400, count=512), str(log), 0)
    assert re.findall(r'process (\d+)', waited) == ['0', '1', '2']
    assert waited.endswith("which is in phase 'step 4', and 297 others")
