"""One run writes to a directory at a time, with real processes."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import disk_full_at

from megajax.core.config import CheckpointError, ConfigError
from megajax.core.config.recorded import LOCK
from megajax.runtime.run.lock import run_lock, running_in

HOLD = """
import sys, time
from pathlib import Path
from megajax.runtime.run.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print('held', flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, '-c', HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == 'held\n'
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_by_name_and_takes_over_the_lock_of_a_killed_one(
    tmp_path: Path, holder: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pytest.raises(
            ConfigError, match=rf'locked by pid {holder.pid} on host {os.uname().nodename} since 2'
        ),
        run_lock(tmp_path),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with caplog.at_level(logging.WARNING), run_lock(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())['pid'] == os.getpid()
    assert f'pid {holder.pid} on host' in caplog.text
    caplog.clear()
    with run_lock(tmp_path):
        pass
    assert not caplog.records


def test_an_error_lets_go(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match='of the run'), run_lock(tmp_path / 'run'):
            raise RuntimeError('of the run')


@pytest.mark.parametrize('left', ['', 'not json'])
def test_a_full_disk_does_not_replace_the_error_of_the_run(tmp_path: Path, left: str) -> None:
    (tmp_path / LOCK).write_text(left)
    with disk_full_at(0):
        with pytest.raises(CheckpointError, match='of the run'), run_lock(tmp_path):
            raise CheckpointError('of the run')
        with run_lock(tmp_path):
            pass


def test_the_other_processes_of_a_run_do_not_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_lock(tmp_path):
        monkeypatch.setattr('jax.process_index', lambda: 1)
        with run_lock(tmp_path):
            pass


def test_a_directory_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match='cannot be written'), run_lock(tmp_path / 'file' / 'run'):
        pass
    (tmp_path / LOCK).symlink_to(tmp_path / 'file')
    with pytest.raises(ConfigError, match='cannot be written'), run_lock(tmp_path):
        pass


@pytest.mark.parametrize('left', [b'not json', b'{}', b'[]', b'\0\0', b'\xff\xfe', b'[' * 1000])
def test_a_damaged_lock_file_is_no_obstacle(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LOCK).write_bytes(left)
    assert running_in(tmp_path) is None
    with run_lock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == ''
