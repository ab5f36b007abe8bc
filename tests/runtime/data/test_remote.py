"""Inputs with URLs are read as those with paths: in bounded memory, and errors have a place."""

import logging
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest
from runtime.data import stores
from runtime.data.stores import copy
from runtime.data.test_inputs import LINES, WRITERS, units, write, write_parquet

from megajax.core.config import ConfigError
from megajax.corpus.build import build
from megajax.corpus.job import Job, fingerprint
from megajax.corpus.partial import read_progress
from megajax.runtime.data.sources import remote
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.data.sources.parse import parse
from megajax.runtime.data.sources.pieces import Position, Unit
from megajax.runtime.data.sources.read import read_units


class Server(SimpleHTTPRequestHandler):
    """A web server of a folder, without ranges.

    It breaks off a file named cut.jsonl, and denies access to denied.jsonl, as long as there is no
    file named whole. It pauses in the middle of slow.jsonl.
    """

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == '/denied.jsonl' and not Path(self.directory, 'whole').exists():
            self.send_error(403)
        else:
            super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.path == '/cut.jsonl' and not Path(self.directory, 'whole').exists():
            outputfile.write(source.read(5000))
        else:
            if self.path == '/slow.jsonl':
                outputfile.write(source.read(5000))
                time.sleep(0.3)
            super().copyfile(source, outputfile)


@pytest.fixture(name='memory')
def use_memory(tmp_path: Path) -> Iterator[str]:
    with stores.memory(tmp_path.name) as url:
        yield url


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """The address of a real web server of `tmp_path`."""
    pytest.importorskip('aiohttp', reason='the extra remote is not installed')
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Server, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
    thread.start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(name='s3')
def use_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with stores.s3(monkeypatch.setenv) as url:
        yield url


def test_files_named_one_by_one_are_looked_at_together(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, look = threading.Barrier(2, timeout=5), remote.look

    def look_with_another(url: str) -> remote.Looked:
        together.wait()
        return look(url)

    urls = [f'{memory}/{name}.jsonl' for name in 'ab']
    for url in urls:
        fsspec.filesystem('memory').pipe(url, LINES)
    monkeypatch.setattr(remote, 'look', look_with_another)
    assert [input.path for input in find_inputs(urls, None)] == urls


def contents(found: list[Unit]) -> list[tuple[Any, ...]]:
    return [
        (piece.offset, piece.line, piece.data, piece.first, piece.last)
        for unit in found
        for piece in unit.pieces
    ]


def check_the_same_units(folder: Path, url: str) -> None:
    for name in (*(f'a.jsonl{suffix}' for suffix in WRITERS), 'b.parquet'):
        here = units(str(folder / name), unit=2000)
        there = units(f'{url}/{name}', unit=2000)
        assert contents(there) == contents(here)
        middle = len(there) // 2
        rest = units(f'{url}/{name}', unit=2000, start=there[middle].after)
        assert contents(rest) == contents(here[middle + 1 :])


def write_all(folder: Path) -> None:
    for suffix in WRITERS:
        write(folder, f'a.jsonl{suffix}', LINES)
    write_parquet(folder / 'b.parquet', [f'row {i} ' * (i % 9) for i in range(500)])


def test_a_memory_has_the_units_of_files(tmp_path: Path, memory: str) -> None:
    write_all(tmp_path)
    copy(tmp_path, memory)
    check_the_same_units(tmp_path, memory)


def test_a_web_server_without_ranges_has_the_units_of_files(tmp_path: Path, web: str) -> None:
    write_all(tmp_path)
    check_the_same_units(tmp_path, web)


def test_a_query_that_names_the_file_decides_how_it_is_read(tmp_path: Path, web: str) -> None:
    for suffix in WRITERS:
        write(tmp_path, f'a.jsonl{suffix}', LINES)
        (tmp_path / 'get').write_bytes((tmp_path / f'a.jsonl{suffix}').read_bytes())
        here = units(f'{tmp_path}/a.jsonl{suffix}', unit=2000)
        for name in (f'get?file=a.jsonl{suffix}', f'a.jsonl{suffix}?version=1.5'):
            assert contents(units(f'{web}/{name}', unit=2000)) == contents(here)


def test_s3_has_the_units_of_files(tmp_path: Path, s3: str) -> None:
    write_all(tmp_path)
    copy(tmp_path, s3)
    check_the_same_units(tmp_path, s3)
    assert [input.path for input in find_inputs([f'{s3}/a.*'], None)] == [
        f'{s3}/a.jsonl{suffix}' for suffix in WRITERS
    ]
    with pytest.raises(ConfigError, match=r's3://corpus/none\.jsonl: there is no such file'):
        find_inputs([f'{s3}/none.jsonl'], None)


def test_a_glob_names_files_in_order(tmp_path: Path, memory: str) -> None:
    for name in ('c.jsonl', 'a.jsonl', 'b.txt'):
        write(tmp_path, name, b'{}')
    copy(tmp_path, memory)
    fsspec.filesystem('memory').mkdir(f'/{tmp_path.name}/folder.jsonl')
    names = [os.path.basename(input.path) for input in find_inputs([f'{memory}/*.jsonl'], None)]
    assert names == ['a.jsonl', 'c.jsonl']
    with pytest.raises(ConfigError, match=r'\*.csv: matches no file'):
        find_inputs([f'{memory}/*.csv'], None)
    with pytest.raises(ConfigError, match=r'folder\.jsonl: is a folder'):
        find_inputs([f'{memory}/folder.jsonl'], None)


def test_a_bad_line_is_named_with_its_url(tmp_path: Path, memory: str) -> None:
    write(tmp_path, 'a.jsonl', b'{"text": "a"}\n{"text": 1}\n')
    copy(tmp_path, memory)
    (piece,) = units(f'{memory}/a.jsonl', unit=1000)[0].pieces
    _, problem = parse(piece, 'text')
    assert problem.path == f'{memory}/a.jsonl:2'


@pytest.mark.parametrize(
    ('url', 'message'),
    [
        ('memory://none/a.jsonl', 'there is no such file'),
        ('nothing://a.jsonl', 'Protocol not known: nothing; use s3://'),
        ('dropbox://a.jsonl', 'needs a package that is not installed'),
    ],
)
def test_a_url_that_cannot_be_opened_is_a_mistake_of_the_user(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f'{url}: {message}'):
        find_inputs([url], None)


def test_a_library_logs_nothing_beside_the_message_unless_the_user_asked_it_to() -> None:
    quiet, asked = (logging.getLogger(name) for name in ('gcsfs', 'google.auth'))
    before = quiet.level, asked.level
    quiet.setLevel(logging.NOTSET)
    asked.setLevel(logging.DEBUG)
    try:
        with pytest.raises(ConfigError):
            find_inputs(['memory://none.jsonl'], None)
        assert (quiet.level, asked.level) == (logging.CRITICAL, logging.DEBUG)
    finally:
        quiet.setLevel(before[0])
        asked.setLevel(before[1])


def test_an_answer_that_breaks_off_is_no_end(tmp_path: Path, web: str) -> None:
    write(tmp_path, 'cut.jsonl', LINES)
    with pytest.raises(ConfigError, match=r'cut.jsonl: cannot be read to its end: .* at byte'):
        units(f'{web}/cut.jsonl', unit=1000)
    with pytest.raises(ConfigError, match=r'none\.jsonl: there is no such file'):
        find_inputs([f'{web}/none.jsonl'], None)


@pytest.mark.parametrize('set_by_user', [False, True])
def test_a_response_may_take_longer_than_aiohttp_allows_by_default(
    set_by_user: bool, tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.get_filesystem_class('http')
    limit = import_module('aiohttp').ClientTimeout(total=0.1)
    monkeypatch.setattr('aiohttp.client.DEFAULT_TIMEOUT', limit)
    if set_by_user:
        monkeypatch.setitem(fsspec.config.conf, 'http', {'timeout': 60})
    write(tmp_path, 'slow.jsonl', LINES)
    files.clear_instance_cache()  # a session keeps the limit with which it began
    try:
        found = units(f'{web}/slow.jsonl', unit=2000)
    finally:
        files.clear_instance_cache()
    assert contents(found) == contents(units(f'{tmp_path}/slow.jsonl', unit=2000))


def test_a_long_file_of_a_web_server_takes_little_memory(tmp_path: Path, web: str) -> None:
    write(tmp_path, 'long.jsonl', LINES * 700)
    size = (tmp_path / 'long.jsonl').stat().st_size
    inputs = find_inputs([f'{web}/long.jsonl'], None)
    tracemalloc.start()
    read = sum(len(p.data) for unit in read_units(inputs, 'text', Position()) for p in unit.pieces)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read == size
    assert size > 4 * remote.BLOCK
    assert peak < 3 * remote.BLOCK


def test_a_changed_file_is_another_input(tmp_path: Path, memory: str) -> None:
    write(tmp_path, 'a.jsonl', LINES)
    job = Job(out='out', inputs=(f'{memory}/a.jsonl',), tokenizer='bytes')

    def mark() -> str:
        return fingerprint(job, find_inputs(job.inputs, None), None, 1000)

    copy(tmp_path, memory)
    first = mark()
    assert mark() == first
    copy(tmp_path, memory)  # the same bytes, written again
    assert mark() != first


@pytest.mark.usefixtures('one_thread')
def test_a_build_of_a_url_is_that_of_the_file(tmp_path: Path, memory: str) -> None:
    write(tmp_path, 'a.jsonl.gz', LINES)
    copy(tmp_path, memory)
    for name, source in (('here', tmp_path), ('there', memory)):
        job = Job(
            out=str(tmp_path / name),
            inputs=(f'{source}/a.jsonl.gz',),
            tokenizer='bytes',
            workers=1,
        )
        build(job)
    for suffix in ('bin', 'idx'):
        here, there = (tmp_path / f'{name}.{suffix}' for name in ('here', 'there'))
        assert there.read_bytes() == here.read_bytes()


@pytest.mark.usefixtures('one_thread')
@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('cut', 'cannot be read to its end: .* at byte .*; check the network'),
        ('denied', 'cannot be read: 403, .*; check the name and the credentials .*'),
    ],
)
def test_a_build_resumes_after_an_error_of_the_server(
    name: str, message: str, tmp_path: Path, web: str
) -> None:
    for each in ('a', name):
        write(tmp_path, f'{each}.jsonl', LINES)
    job = Job(
        out=str(tmp_path / 'out'),
        inputs=(f'{web}/a.jsonl', f'{web}/{name}.jsonl'),
        tokenizer='bytes',
        workers=1,
    )
    said = rf'{name}\.jsonl: {message}; run the same command again to resume$'
    with pytest.raises(ConfigError, match=said):
        build(job, unit=1000, checkpoint_units=1)
    assert read_progress(tmp_path / 'out').tokens > 0  # type: ignore[union-attr]
    (tmp_path / 'whole').touch()
    summary = build(job, unit=1000)
    assert 0 < summary.encoded < summary.progress.text_bytes
    assert not (tmp_path / 'out.partial').exists()
