"""A command says before it computes which of its files cannot be written."""

import os
import posix
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, disk_full_at

from megajax.base.files.outputs import (
    check_outputs,
    replace_file,
    sync,
    url_of,
    with_folder,
    write_output,
    writing,
)
from megajax.core.config import ConfigError


def test_the_folders_of_a_file_are_created_when_it_is_written_and_not_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / 'no/such/it.json'
    check_outputs(path, None)
    assert not list(tmp_path.iterdir())
    with_folder(path).write_text('{}')
    check_outputs(path)


ASCII = """
import sys
from pathlib import Path
from megajax.base.files.outputs import write_output
write_output(Path(sys.argv[1]), 'caf\\xe9 \\u65e5')
"""


def test_a_text_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    path = tmp_path / 'no/such/it.json'
    environment = os.environ | {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONPATH': str(ROOT)}
    subprocess.run([sys.executable, '-c', ASCII, str(path)], env=environment, check=True)
    assert path.read_bytes().decode() == 'caf\xe9 \u65e5'


def test_a_text_that_does_not_fit_on_the_disk_is_a_mistake_with_a_fix(tmp_path: Path) -> None:
    path = tmp_path / 'it.json'
    message = f'^{path} cannot be written: File too large; free some space, or choose another file$'
    for before in (None, 'the last result'):
        if before:
            path.write_text(before)
        with disk_full_at(10), pytest.raises(ConfigError, match=message):
            write_output(path, 11 * 'x')
        assert [each.read_text() for each in tmp_path.iterdir()] == ([before] if before else [])


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / 'there').mkdir()
    file, link = tmp_path / 'there/it.json', tmp_path / 'link.json'
    file.touch()
    link.symlink_to(file)
    write_output(link, b'{}')
    assert (link.is_symlink(), file.read_text()) == (True, '{}')


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='there is no /dev/full')
def test_outputs_are_written_even_if_the_result_cannot_be_printed(tmp_path: Path) -> None:
    files = tmp_path / 'a.json', tmp_path / 'no/such/b.txt'
    with (
        pytest.raises(OSError, match='No space left'),
        writing((files[0], 'a'), (None, 'no'), (files[1], 'b')),
        open('/dev/full', 'w') as stdout,
    ):
        print('result', file=stdout)
    assert [file.read_text() for file in files] == ['a', 'b']


@pytest.mark.parametrize('url', ['s3://bucket/a/b.json', 'gs://bucket', 'HTTPS://host/a.json'])
def test_no_folder_is_named_after_the_protocol_of_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=f'^{url} is a URL: give a path on this machine'):
        check_outputs(Path(url))


@pytest.mark.parametrize('path', ['a:b/c', 's3:', '/s3:/bucket', './a/s3:/b'])
def test_a_colon_alone_makes_no_url(path: str) -> None:
    assert url_of(Path(path)) is None


def test_every_file_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError) as error:
        check_outputs(tmp_path, tmp_path / 'file/a/b.json', tmp_path / 'x', tmp_path / 'x')
    assert str(error.value) == (
        f'{tmp_path} is a folder: give the name of a file in it\n'
        f'{tmp_path}/file/a/b.json: {tmp_path}/file is a file, not a folder: choose another file\n'
        f'{tmp_path}/x would be written twice: give each output its own file'
    )


@pytest.mark.skipif(not Path('/proc/self').exists(), reason='there is no /proc')
def test_a_folder_of_a_file_system_that_cannot_flush_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, 'fsync', posix.fsync)  # `conftest.py` replaces it
    sync(Path('/proc'))
    with pytest.raises(OSError, match='Invalid argument'):
        sync(Path('/dev/null'))


def test_a_file_of_a_cache_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / 'cache/file'
    for content in (b'one', b'other'):
        replace_file(path, content)
        assert path.read_bytes() == content
    (tmp_path / 'cache/folder/in_it').mkdir(parents=True)
    with pytest.raises(OSError, match='directory'):
        replace_file(tmp_path / 'cache/folder', b'other')
    assert sorted(each.name for each in path.parent.iterdir()) == ['file', 'folder']
