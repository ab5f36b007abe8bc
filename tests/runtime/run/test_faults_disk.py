"""A disk that is full, or that cannot be written any more, costs a run checkpoints and not itself;
with a file system of its own.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import CONFIG, fill, finish, losses, read_until, start
from support import write_run

from megajax.runtime.checkpoint.digests import find_steps, problems

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which('mount'), reason='mounting needs root'
    ),
]

LONG = (
    'train.steps=1000000',
    'train.log_every=1000000',
    'optim.schedule=constant',
    'checkpoint.every=20',
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    disk = folder / 'run/checkpoints'
    disk.mkdir(parents=True)
    if subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=8m', 'tmpfs', disk], check=False, capture_output=True
    ).returncode:
        pytest.skip('mounting is not allowed here')
    yield folder
    subprocess.run(['umount', '--lazy', disk], check=True)


def full(disk: Path) -> None:
    fill(disk / 'ballast')


def empty(disk: Path) -> None:
    (disk / 'ballast').unlink()


def remount(disk: Path, how: str) -> None:
    deadline = time.monotonic() + 100
    while subprocess.run(
        ['mount', '-o', f'remount,{how}', disk], check=False, capture_output=True
    ).returncode:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # between two saves


def read_only(disk: Path) -> None:
    remount(disk, 'ro')


def writable(disk: Path) -> None:
    remount(disk, 'rw')


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ('breaks', 'heals', 'why'),
    [
        (full, empty, 'No space left'),
        pytest.param(*(read_only, writable, 'Read-only file system'), marks=pytest.mark.exhaustive),
    ],
)
def test_a_disk_that_fails_costs_checkpoints_and_only_the_last_ends_the_run_with_4(
    folder: Path, breaks: Callable[[Path], None], heals: Callable[[Path], None], why: str
) -> None:
    run, disk = folder / 'run', folder / 'run/checkpoints'
    process = start(folder, *LONG)
    wait_for(lambda: len(find_steps(disk)) == 2)
    breaks(disk)
    said = read_until(process, 'could not be written')
    failed = len(losses(run))
    assert why in said
    assert 'trying again' in read_until(process, 'could not be written') + said
    wait_for(lambda: len(losses(run)) > failed + 20)  # it goes on
    assert all(not problems(disk / str(step)) for step in find_steps(disk))
    heals(disk)
    wait_for(lambda: max(find_steps(disk)) > failed)
    breaks(disk)
    broken = len(losses(run))
    wait_for(lambda: len(losses(run)) > broken + 40)
    breaks(disk)  # A save that was under way has failed, and its files have left room.
    kept = find_steps(disk)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert (code, 'error: the last checkpoint is not in' in said) == (4, True), said
    heals(disk)
    sound = [step for step in find_steps(disk) if not problems(disk / str(step))]
    assert set(kept) & set(sound)
    code, said = finish(start(folder, *LONG[1:], f'train.steps={sound[-1] + 5}', 'run.resume=must'))
    assert (code, f'checkpoints, step {sound[-1]}\n' in said) == (0, True), said
    assert sound[-1] + 5 in find_steps(disk)


@pytest.mark.exhaustive
def test_two_processes_find_a_full_disk_and_neither_waits_for_the_other(folder: Path) -> None:
    run, disk = folder / 'run', folder / 'run/checkpoints'
    process = start(folder, *LONG, processes=2)
    wait_for(lambda: len(find_steps(disk)) == 2)
    full(disk)
    assert 'No space left' in read_until(process, 'could not be written')
    failed = len(losses(run))
    wait_for(lambda: len(losses(run)) > failed + 20)
    full(disk)
    wait_for(lambda: len(losses(run)) > failed + 60)
    empty(disk)
    wait_for(lambda: max(find_steps(disk)) > failed + 60)
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    assert code == 75, said
    assert not problems(disk / str(find_steps(disk)[-1]))
