"""What cannot be written waits as a whole, and leaves no part of itself behind."""

from pathlib import Path

import pytest
from support import disk_full_at

from megajax.runtime.run.log import append
from megajax.runtime.run.log.append import AppendedFile


def test_pieces_that_do_not_fit_are_written_when_there_is_room_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / 'folder/file'
    file = AppendedFile(path)
    file.append(b'one\n')
    with disk_full_at(10):
        file.append(b'two\n')
        for piece in (b'three\n', b'four\n'):  # two bytes of the first do fit
            with pytest.raises(OSError, match='too large'):
                file.append(piece)
            assert path.read_bytes() == b'one\ntwo\n'
    file.append(b'five\n')
    file.close()
    assert path.read_bytes() == b'one\ntwo\nthree\nfour\nfive\n'


def test_a_file_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / 'file'
    path.mkdir()
    file = AppendedFile(path)
    with pytest.raises(IsADirectoryError):
        file.append(b'one\n')
    path.rmdir()
    file.append(b'two\n')
    assert path.read_bytes() == b'one\ntwo\n'
    file.close()


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, 'MAX_WAITING', 2)
    file = AppendedFile(tmp_path)
    for piece in (b'one\n', b'two\n', b'three\n'):
        with pytest.raises(IsADirectoryError):
            file.append(piece)
    assert list(file.waiting) == [b'two\n', b'three\n']
