"""A folder that is written appears when it is complete and on disk, or not at all."""

import os
from pathlib import Path

import pytest
from support import disk_full_at

from megajax.core.config import ConfigError
from megajax.interop import folder
from megajax.interop.folder import check_new, new_folder


def test_everything_is_on_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, synced = tmp_path / 'out', list[tuple[str, bool]]()
    monkeypatch.setattr(
        folder, 'sync', lambda path: synced.append((str(path.relative_to(tmp_path)), out.exists()))
    )
    with new_folder(out) as partial:
        (partial / 'deep').mkdir()
        for name in ('config.json', 'deep/weights'):
            (partial / name).write_text('text')
        assert not out.exists()
    assert (out / 'deep/weights').read_text() == 'text'
    before = {path for path, is_there in synced if not is_there}
    assert before == {
        'out.partial',
        'out.partial/deep',
        'out.partial/config.json',
        'out.partial/deep/weights',
    }
    assert [path for path, is_there in synced if is_there] == ['.']


def test_neither_a_run_nor_an_export_is_written_to_a_folder_named_after_a_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, message = Path('gs://bucket/run'), '^gs://bucket/run is a URL: give a path on this'
    with pytest.raises(ConfigError, match=message):
        check_new(out)
    with pytest.raises(ConfigError, match=message), new_folder(out):
        pass
    assert not any(tmp_path.iterdir())


def test_a_run_needs_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    (tmp_path / 'closed').mkdir(0o500)
    with pytest.raises(ConfigError, match='file is a file: choose another path'):
        check_new(tmp_path / 'file' / 'run')
    if os.geteuid():  # root may write everywhere
        with pytest.raises(ConfigError, match='closed is not writable: change its permissions, or'):
            check_new(tmp_path / 'closed' / 'a' / 'run')
    check_new(tmp_path / 'new' / 'run')


def test_what_fails_leaves_no_folder_and_the_next_begins_anew(tmp_path: Path) -> None:
    out = tmp_path / 'out'

    def fail() -> None:
        with new_folder(out) as partial:
            (partial / 'half').write_text('')
            raise ValueError('half way')

    with pytest.raises(ValueError, match='half way'):
        fail()
    assert not out.exists()
    with new_folder(out) as partial:
        assert not any(partial.iterdir())
    with pytest.raises(ConfigError, match='already exists'), new_folder(out):
        pass


def test_without_space_nothing_is_left(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / 'out') as partial:
            (partial / 'deep').mkdir()
            (partial / 'deep' / 'weights').write_bytes(bytes(2000))

    message = 'out.partial cannot be written: File too large; free some space, or choose another'
    with disk_full_at(1000), pytest.raises(ConfigError, match=message):
        fill()
    assert not any(tmp_path.iterdir())


def test_two_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with (
        new_folder(tmp_path / 'out'),
        pytest.raises(ConfigError, match='is being written by another'),
        new_folder(tmp_path / 'out'),
    ):
        pass
