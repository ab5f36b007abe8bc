"""What does not belong among a run's checkpoints is deleted, or left alone."""

import contextlib
import itertools
import threading
import time
from pathlib import Path

import pytest

from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.digests import COMMIT
from megajax.runtime.checkpoint.record import RECORD
from megajax.runtime.checkpoint.step_folders import StepFolders
from megajax.runtime.checkpoint.strays import delete_folder, move_aside


def holding(folder: Path, step: int) -> Path:
    """A finished checkpoint of `step` in a folder of any name."""
    folder.mkdir()
    (folder / RECORD).write_text(f'{{"step": {step}}}')
    (folder / COMMIT).touch()
    return folder


def test_a_folder_that_is_in_the_way_gets_a_name_that_is_free(tmp_path: Path) -> None:
    for number in range(3):
        path = holding(tmp_path / '300', 200)
        (path / 'mark').write_text(str(number))
        assert move_aside(path)
    names = '300.holds-200', '300.holds-200.2', '300.holds-200.3'
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names]
    assert [(tmp_path / name / 'mark').read_text() for name in names] == ['0', '1', '2']
    assert not move_aside(holding(tmp_path / '200', 200))


def test_a_folder_that_cannot_be_renamed_is_not_deleted(tmp_path: Path) -> None:
    path = holding(tmp_path / ('3' * 250), 200)
    with pytest.raises(CheckpointError, match=r'cannot be renamed .*: File name too long; move it'):
        StepFolders(tmp_path).clear_place(int(path.name))
    assert (path / RECORD).is_file()


def test_a_folder_that_is_still_written_into_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / '2'
    folder.mkdir()
    end = time.monotonic() + 0.1

    def write() -> None:
        with contextlib.suppress(FileNotFoundError):
            for i in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()):
                (folder / str(i)).touch()

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    delete_folder(folder)
    for writer in writers:
        writer.join()
    assert not folder.exists()
