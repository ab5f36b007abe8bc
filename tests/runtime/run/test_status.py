"""A run that is asked where it stands says so, and goes on."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from runs import CONFIG, finish, losses, read_until, start
from support import write_run

from megajax.runtime.processes.signals import TELL, telling
from megajax.runtime.run.clock import Clock, RunSummary
from megajax.runtime.run.status import where_it_stands
from megajax.runtime.run.watchdog import Watchdog


def test_before_the_first_state_there_is_a_phase_alone(tmp_path: Path) -> None:
    summary, watchdog = RunSummary(tmp_path, Clock()), Watchdog(tmp_path, None)
    watchdog.beat('reading the corpus', 'corpus')
    said = where_it_stands(tmp_path, 40, summary, watchdog)
    assert said.startswith("in phase 'reading the corpus' for 0.")
    assert said.endswith('no step is done yet')


def test_the_time_left_is_that_of_steps_after_the_first_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, watchdog = RunSummary(tmp_path, Clock()), Watchdog(tmp_path, None)
    summary.begin(30, lost_seconds=0)
    assert 'left' not in where_it_stands(tmp_path, 40, summary, watchdog)
    now = time.monotonic()
    for step, seconds in ((31, 600), (32, 610), (33, 620)):  # first, 590 s of compilation
        monkeypatch.setattr(time, 'monotonic', partial(float, now + seconds))
        summary.reach(step)
        said = where_it_stands(tmp_path, 40, summary, watchdog)
        assert said.startswith(f"step {step} of 40 is done; in phase 'starting'")
        assert ('left' in said) == (step > 31)
    assert said.endswith('about 0:01:10 left; newest checkpoint: none')
    summary.step = 30  # rolled back
    assert 'left' not in where_it_stands(tmp_path, 40, summary, watchdog)


def test_a_folder_that_cannot_be_read_is_named_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def iterdir(folder: Path) -> None:
        raise PermissionError(13, 'Permission denied', str(folder))

    (tmp_path / 'checkpoints').mkdir()
    summary, watchdog = RunSummary(tmp_path, Clock()), Watchdog(tmp_path, None)
    summary.begin(30, lost_seconds=0)
    monkeypatch.setattr(Path, 'iterdir', iterdir)
    said = where_it_stands(tmp_path, 40, summary, watchdog)
    assert f'newest checkpoint: unknown ({tmp_path}/checkpoints cannot be read: Permission' in said


def test_it_is_told_on_standard_error_until_the_run_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(TELL)
    with telling(lambda: 'step 7'):
        os.kill(os.getpid(), TELL)
        assert capfd.readouterr().err == 'SIGUSR2: step 7\n'
    assert signal.getsignal(TELL) == before


@pytest.mark.faults
def test_a_run_that_is_asked_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    folder = write_run(tmp_path, CONFIG)
    process = start(folder)
    for place in ('^compiling', 'step 13/40'):
        read_until(process, place)
        process.send_signal(TELL)
        read_until(process, '^SIGUSR2: (step|in phase)')
    code, said = finish(process)
    assert code == 0, said
    assert len(losses(folder / 'run')) == 40
