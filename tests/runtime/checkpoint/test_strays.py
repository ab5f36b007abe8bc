"""What does not belong among a run's checkpoints is deleted, or left alone."""

import contextlib
import itertools
import threading
import time
from pathlib import Path

from megajax.runtime.checkpoint.strays import delete_folder


def test_a_folder_that_is_still_written_into_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / '2'
    folder.mkdir()
    end = time.monotonic() + 0.3

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
