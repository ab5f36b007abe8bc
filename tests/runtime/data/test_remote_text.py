"""Text, JSON lines and Parquet with a URL give the batches that they give on the disk."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest
from runtime.data import stores
from runtime.data.test_inputs import write_parquet
from runtime.data.test_load import SMALL, assert_equal, config

from megajax.base.errors import UnreachableError
from megajax.core.config import Config, ConfigError
from megajax.runtime.data import Data, load_data, text_tokens
from megajax.runtime.data.sources import remote_file, shares
from megajax.runtime.data.sources.block_cache import BLOCK, BlockCache, locked
from megajax.runtime.data.sources.remote import look
from megajax.runtime.data.sources.remote_file import RemoteFile


@pytest.fixture(name='here')
def make_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with JSON lines, Parquet, chats and text."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    here = tmp_path / 'here'
    here.mkdir()
    for name in 'ab':
        lines = [json.dumps({'text': f'{name} {i} ' * 30}) for i in range(60)]
        (here / f'{name}.jsonl').write_text('\n'.join(lines))
    write_parquet(here / 'c.parquet', [f'row {i} ' * 30 for i in range(60)])
    roles = ('user', 'What is {}?'), ('assistant', 'It is {}.')
    chats = [
        {'messages': [{'role': role, 'content': text.format(i)} for role, text in roles]}
        for i in range(60)
    ]
    (here / 'chat.jsonl').write_text('\n'.join(map(json.dumps, chats)))
    (here / 'd.txt').write_text('one text, ' * 999)
    return here


@pytest.fixture(params=['memory', 's3'])
def there(
    request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    store = stores.memory(here.parent.name) if request.param == 'memory' else None
    with store or stores.s3(monkeypatch.setenv) as url:
        stores.copy(here, url)
        yield url


def load(corpus: object, *keys: str) -> Data:
    return load_data(config(f'data.corpus={corpus}', 'train.eval_batches=1', *keys))


def check_the_same(local: str, remote: str, *keys: str) -> None:
    one, other = load(local, *keys), load(remote, *keys)
    for step in (0, 1, 7):
        assert_equal(one.train[step], other.train[step])
    assert_equal(one.validation[0], other.validation[0])
    assert one.tokenizer.fingerprint == other.tokenizer.fingerprint
    for name, value in one.fingerprints.items():
        assert other.fingerprints[name.replace(local, remote)] == value


@pytest.mark.parametrize('name', ['a.jsonl', 'c.parquet', 'chat.jsonl', 'd.txt'])
def test_a_remote_file_has_the_batches_of_the_file(here: Path, there: str, name: str) -> None:
    check_the_same(f'{here}/{name}', f'{there}/{name}')


def test_a_glob_has_the_batches_of_the_folder(here: Path, there: str) -> None:
    (here / 'chat.jsonl').unlink()
    check_the_same(str(here), f'{there}/[abc].*')


@pytest.mark.parametrize(
    ('name', 'query'),
    [('a.jsonl', 'download=true'), ('c.parquet', 'path=x/y'), ('d.txt', 'v=1')],
)
def test_a_query_does_not_change_how_a_file_is_read(here: Path, name: str, query: str) -> None:
    with stores.web(here) as server:
        check_the_same(f'{here}/{name}', f'{server.url}/{name}?{query}')


@pytest.mark.parametrize('suffix', ['jsonl', 'jsonl.gz'])
@pytest.mark.parametrize('order', ['stateless', 'streamed'])
def test_a_query_that_names_the_file_decides_how_it_is_read(
    here: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, order: str
) -> None:
    monkeypatch.setattr(shares, 'SMALLEST', 400)
    content = (here / 'a.jsonl').read_bytes()
    for name in ('get', f'get?file=a.{suffix}'):
        is_packed = suffix.endswith('gz')
        (here / name).write_bytes(gzip.compress(content) if is_packed else content)
    with stores.web(here) as server:
        name, key = f'get?file=a.{suffix}', f'data.order={order}'
        check_the_same(f'{here}/{name}', f'{server.url}/{name}', key)


@pytest.mark.parametrize('name', ['a.jsonl.gz', 'd.txt', 'e'])
def test_a_file_is_read_though_the_server_denies_access_to_files_that_do_not_exist(
    here: Path, name: str
) -> None:
    (here / 'a.jsonl.gz').write_bytes(gzip.compress((here / 'a.jsonl').read_bytes()))
    (here / 'e').write_bytes((here / 'd.txt').read_bytes())
    with stores.web(here) as server:
        server.missing = 403
        check_the_same(f'{here}/{name}', f'{server.url}/{name}')
        with pytest.raises(ConfigError, match=r'/none: cannot be read: 403.* check the name and '):
            load(f'{server.url}/none')


@pytest.mark.parametrize('name', ['a.jsonl', 'chat.jsonl'])
def test_the_second_start_reads_no_file_again(here: Path, name: str) -> None:
    with stores.web(here) as server:
        for _ in range(2):
            check_the_same(f'{here}/{name}', f'{server.url}/{name}')
    assert server.asked == [f'/{name}']


def test_tokens_are_kept_by_all_that_decides_them(here: Path) -> None:
    with stores.web(here) as server:
        for keys in (
            ['data.tokenizer=bytes'],
            ['data.tokenizer=bytes', 'data.split=50,50,0'],
            [],
            ['model.vocab_size=290'],
            ['data.tokenizer=bytes'],
        ):
            check_the_same(f'{here}/a.jsonl', f'{server.url}/a.jsonl', *keys)
    assert server.asked == ['/a.jsonl']


@pytest.mark.parametrize('keys', [[], ['data.tokenizer=bytes']])
def test_damaged_tokens_are_made_again(here: Path, tmp_path: Path, keys: list[str]) -> None:
    with stores.web(here) as server:
        url = f'{server.url}/a.jsonl'
        seen = load(url, *keys).train[0]
        cache = tmp_path / 'cache'
        kept = [path for path in cache.rglob('.tokens/*/*') if path.is_file()]
        for i, path in enumerate(kept):
            content = path.read_bytes()
            path.write_bytes((content[:-3], b'x' * len(content))[i % 2])
            assert_equal(load(url, *keys).train[0], seen)
        kept[0].unlink()
        assert_equal(load(url, *keys).train[0], seen)
        assert server.asked == ['/a.jsonl']
        for path in cache.rglob('*'):
            if path.is_file():
                path.write_bytes(b'')
        assert_equal(load(url, *keys).train[0], seen)
        assert server.asked == ['/a.jsonl', '/a.jsonl']


@pytest.mark.parametrize('keys', [[], ['data.tokenizer=bytes']])
def test_one_of_several_processes_tokenizes_text_on_the_disk(
    here: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    path = here / 'a.jsonl'
    alone = load(path, *keys)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    times: list[Config] = []
    tokenize = text_tokens.tokenize
    monkeypatch.setattr(
        text_tokens,
        'tokenize',
        lambda config, *rest: times.append(config) or tokenize(config, *rest),
    )
    for process in (load(path, *keys), load(path, *keys)):
        assert_equal(process.train[1], alone.train[1])
        assert process.fingerprints == alone.fingerprints
        assert len(times) == 1
    status = path.stat()
    path.write_text(path.read_text().replace('7', '8'))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert load(path, *keys).fingerprints != alone.fingerprints
    load(here / 'chat.jsonl', 'train.seq_len=64', *keys)
    assert len(times) == 2


def test_processes_that_waited_in_vain_tokenize_at_the_same_time(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(text_tokens.KeptTokens, '_keep', lambda self, found: None)
    both, first, tokenize = threading.Barrier(3), threading.Event(), text_tokens.tokenize

    def slow(*args: Any) -> Any:
        if not first.is_set():  # the others wait for its tokens meanwhile
            first.set()
            time.sleep(0.2)
        else:
            both.wait(timeout=10)
        return tokenize(*args)

    monkeypatch.setattr(text_tokens, 'tokenize', slow)
    with ThreadPoolExecutor(3) as threads:
        leader = threads.submit(load, here / 'a.jsonl', 'data.tokenizer=bytes')
        first.wait()
        others = [threads.submit(load, here / 'a.jsonl', 'data.tokenizer=bytes') for _ in 'ab']
        both.wait(timeout=10)
        loaded = [each.result() for each in (leader, *others)]
    for other in loaded[1:]:
        assert_equal(other.train[1], loaded[0].train[1])


def test_a_folder_of_tokens_that_another_host_has_made_stays(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    load(here / 'a.jsonl', 'data.tokenizer=bytes')
    (about,) = (here.parent / 'cache').rglob('about.json')
    inode, read = about.stat().st_ino, text_tokens.KeptTokens._read
    answers = iter([None, None])  # the other host makes it after this one has looked
    monkeypatch.setattr(text_tokens.KeptTokens, '_read', lambda self: next(answers, read(self)))
    load(here / 'a.jsonl', 'data.tokenizer=bytes')
    assert about.stat().st_ino == inode
    assert not caplog.records


def test_without_a_cache_each_process_tokenizes(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setenv('XDG_CACHE_HOME', str(here / 'd.txt'))
    assert load(here / 'a.jsonl').train[0]
    assert 'each process tokenizes' in caplog.text


def test_a_copy_that_broke_off_is_continued_and_is_never_a_document(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, 'PIECE', 1000)
    monkeypatch.setattr(remote_file, 'IN_RUN', 0.0)
    size = (here / 'd.txt').stat().st_size
    assert size == 9990
    with stores.web(here) as server:
        server.most = 4
        with pytest.raises(UnreachableError):
            load(f'{server.url}/d.txt')
        assert server.asked == ['/d.txt'] * 5
        (part,) = (tmp_path / 'cache').rglob('.d.txt.part')
        with part.open('ab') as file:
            file.write(bytes(500))  # a piece that is not whole
        server.most = 100
        check_the_same(f'{here}/d.txt', f'{server.url}/d.txt')
        assert server.asked == ['/d.txt'] * (5 + 6)
        assert not part.exists()


def test_a_version_may_be_quoted_in_one_answer_and_not_in_another(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, 'LOOK_EVERY', 0.0)
    with stores.web(here) as server:
        url, cache = f'{server.url}/d.txt', BlockCache(tmp_path / 'blocks', BLOCK)
        size, version = look(url)
        assert size is not None
        for written in (version, f'"{version}"'):
            file = RemoteFile(url, cache, (size, written))
            assert file.read(0, size) == (here / 'd.txt').read_bytes()
        with pytest.raises(ConfigError, match='has changed while the run was reading'):
            RemoteFile(url, cache, (size, f'{version}1')).read(0, size)


def test_a_file_that_changes_while_it_is_copied_is_not_trained_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, 'PIECE', 1000)
    with stores.web(here) as server:
        url = f'{server.url}/d.txt'
        fetch = remote_file.fetch

        def change(url: str, start: int, stop: int) -> bytes:
            if start == 5000:
                (here / 'd.txt').write_text('two texts, '[:10] * 999)
                os.utime(here / 'd.txt', (0, 0))
            return fetch(url, start, stop)

        monkeypatch.setattr(remote_file, 'fetch', change)
        with pytest.raises(ConfigError, match=r'd\.txt: has changed while the run was reading'):
            load(url)
        monkeypatch.setattr(remote_file, 'fetch', fetch)
        check_the_same(f'{here}/d.txt', url)


def test_a_server_without_versions_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.Ranges, 'date_time_string', lambda *_: '')
    with (
        stores.web(here) as server,
        pytest.raises(ConfigError, match='neither an ETag nor a time of the last change'),
    ):
        load(f'{server.url}/d.txt')


def test_the_files_of_a_corpus_in_use_stay_in_a_full_cache(tmp_path: Path) -> None:
    for name in ('used', 'old'):
        (tmp_path / name).mkdir()
        for i in range(10):
            (tmp_path / name / str(i)).write_bytes(bytes(100))
            os.utime(tmp_path / name / str(i), (i, i))
    with locked(tmp_path / 'used', shared=True):
        BlockCache(tmp_path, 1000)
        assert len(list((tmp_path / 'used').iterdir())) == 10
        assert not list((tmp_path / 'old').iterdir())
    BlockCache(tmp_path, 500)
    assert sorted(path.name for path in (tmp_path / 'used').iterdir()) == list('6789')


def test_a_disk_that_is_full_names_the_cache_and_the_way_out(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, 'pwrite', full)
    with (
        stores.web(here) as server,
        pytest.raises(ConfigError, match=r'run\.data_cache: ') as error,
    ):
        load(f'{server.url}/d.txt')
    cache = tmp_path / 'cache/megajax/corpora'
    assert f'{cache} cannot be written: No space left on device; free disk space' in str(
        error.value
    )


PROGRAM = """
import sys
from megajax.core.config import load
from megajax.runtime.data import load_data, text_tokens
from megajax.runtime.data.sources import remote_file
remote_file.PIECE = 1000
tokenize = text_tokens.tokenize
text_tokens.tokenize = lambda *x: print('tokenizes') or tokenize(*x)
data = load_data(load('tiny', sys.argv[1:]))
print(data.train[0]['tokens'].sum())
"""


@pytest.mark.faults
def test_two_processes_continue_the_copy_of_one_that_was_killed(here: Path) -> None:
    with stores.web(here) as server:
        server.most = 4
        keys = [*SMALL, f'data.corpus={server.url}/d.txt', 'train.eval_batches=1']

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, '-c', PROGRAM, *keys]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        killed = start()
        while len(server.asked) < 5:
            assert killed.poll() is None
            time.sleep(0.01)
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        server.asked.clear()
        server.most = 100
        two = [start() for _ in range(2)]
        said = [process.communicate(timeout=300)[0].split() for process in two]
    assert [process.returncode for process in two] == [0, 0]
    assert server.asked == ['/d.txt'] * 6
    assert sorted(map(len, said)) == [1, 2]  # only one of them tokenizes
    assert said[0][-1] == said[1][-1]


def test_a_changed_file_has_another_version(here: Path, there: str) -> None:
    key = f'data.corpus={there}/c.parquet'
    before, again = load_data(config(key)), load_data(config(key))
    assert before.fingerprints == again.fingerprints
    write_parquet(here / 'c.parquet', [f'other row {i} ' * 30 for i in range(60)])
    stores.copy(here, there)
    changed = before.fingerprints.items() ^ load_data(config(key)).fingerprints.items()
    url = f'{there}/c.parquet'
    parts = {url, f'validation documents of {url}'}
    assert {name for name, _ in changed} == {*parts, f'ETag and size of {url}'}


@pytest.mark.parametrize(
    ('corpus', 'key', 'message'),
    [
        ('{}/none.jsonl', '', 'data.corpus: {}/none.jsonl: there is no such file'),
        ('{}/*.json', '', 'data.corpus: {}/*.json: matches no file'),
        ('{}/bad.jsonl', '', "{}/bad.jsonl:2: 'text' is 1, not text"),
        ('{}/a.jsonl', 'run.data_cache_gb=1e-6', 'data.corpus: {}/a.jsonl: has 0.0 GB, and run.'),
    ],
)
def test_a_mistake_is_named_with_the_url(
    here: Path, there: str, corpus: str, key: str, message: str
) -> None:
    (here / 'bad.jsonl').write_text('{"text": "a"}\n{"text": 1}\n')
    stores.copy(here, there)
    with pytest.raises(ConfigError) as error:
        load_data(config(f'data.corpus={corpus.format(there)}', *filter(None, [key])))
    assert str(error.value).startswith(message.format(there))
