"""Token files on a server give the batches that they give on the disk, and every fault on the way
is found.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from runtime.data import stores
from runtime.data.test_load import assert_equal, build, config

from megajax.base.errors import UnreachableError
from megajax.core.config import ConfigError
from megajax.runtime.data import Data, load_data
from megajax.runtime.data.sources import remote_file
from megajax.runtime.data.sources.block_cache import BLOCK, BlockCache
from megajax.runtime.data.tokens.indexed import CHUNK, write_index

IDS = 'data.tokenizer=none', 'train.sample_prompts=[]', 'model.vocab_size=70000'
LONG = 4 * CHUNK  # tokens of two bytes; a fingerprint reads the first and the last CHUNK


@pytest.fixture(name='here')
def make_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a built corpus."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    (tmp_path / 'here').mkdir()
    build(tmp_path / 'here/web')
    return tmp_path / 'here'


@pytest.fixture(params=['memory', 's3', 'file'])
def there(
    request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The URL of a copy of it."""
    if request.param == 'file':
        yield f'file://{here}'
        return
    store = stores.memory(here.parent.name) if request.param == 'memory' else None
    with store or stores.s3(monkeypatch.setenv) as url:
        stores.copy(here, url)
        yield url


def write_long(prefix: Path) -> None:
    """Token files of several blocks, without a manifest."""
    tokens = np.random.default_rng(0).integers(0, 65_000, LONG).astype(np.uint16)
    Path(f'{prefix}.bin').write_bytes(tokens.tobytes())
    lengths = np.full(LONG // 128, 128, np.int32)
    with Path(f'{prefix}.idx').open('wb') as file:
        write_index(file, tokens.dtype, lengths, np.arange(len(lengths) + 1))


def blocks(tmp_path: Path) -> list[Path]:
    cache = tmp_path / 'cache/megajax/corpora'
    return [path for path in cache.rglob('*') if path.is_file() and path.name.isdigit()]


def check_the_same(one: Data, other: Data, steps: int = 3) -> None:
    for step in (*range(steps), 71):
        assert_equal(one.train[step], other.train[step])
    for step in range(min(len(one.validation), 3)):
        assert_equal(one.validation[step], other.validation[step])
    assert len(one.validation) == len(other.validation)
    assert set(one.fingerprints.values()) <= set(other.fingerprints.values())


@pytest.mark.parametrize('order', ['stateless', 'megatron'])
def test_a_remote_corpus_has_the_batches_of_its_files(here: Path, there: str, order: str) -> None:
    keys = [f'data.order={order}', 'data.document_mask=true', 'train.steps=80']
    local = load_data(config(f'data.corpus={here}/web', *keys))
    remote = load_data(config(f'data.corpus={there}/web', *keys))
    check_the_same(local, remote)
    assert local.tokenizer.fingerprint == remote.tokenizer.fingerprint
    rows = slice(1, 3)  # those of one of several processes
    for step, batch in enumerate(remote.train.read_ahead(0, 9, rows)):
        assert_equal(batch, local.train.rows(step, rows.start, rows.stop))


def test_a_corpus_is_read_though_the_server_denies_access_to_files_that_do_not_exist(
    here: Path,
) -> None:
    write_long(here / 'long')
    with stores.web(here) as server:
        server.missing = 403
        for name, *keys in (('web',), ('long', *IDS)):
            local = load_data(config(f'data.corpus={here}/{name}', *keys))
            check_the_same(local, load_data(config(f'data.corpus={server.url}/{name}', *keys)))
        (here / 'web.idx').unlink()
        with pytest.raises(ConfigError, match=r'/web\.idx: cannot be read: 403.* the credentials'):
            load_data(config(f'data.corpus={server.url}/web'))


def test_a_blend_mixes_local_and_remote_corpora(here: Path, there: str) -> None:
    build(here / 'code')
    blend = 'data.blend={{{}/web: 0.7, {}/code: 0.3}}'
    check_the_same(
        load_data(config(blend.format(here, here))), load_data(config(blend.format(there, here)))
    )


def test_only_what_is_needed_is_fetched_and_only_once(here: Path, tmp_path: Path) -> None:
    write_long(here / 'long')
    with stores.web(here) as server:
        key = f'data.corpus={server.url}/long'
        remote = load_data(config(key, *IDS))
        seen = [remote.train[step] for step in range(2)]
        asked = server.asked.count('/long.bin')
        again = load_data(config(key, *IDS))
        for step, batch in enumerate(seen):
            assert_equal(batch, again.train[step])
        assert server.asked.count('/long.bin') == asked
        assert server.asked.count('/long.idx') == 1
        assert asked <= len(blocks(tmp_path)) < LONG * 2 / BLOCK
        check_the_same(load_data(config(f'data.corpus={here}/long', *IDS)), again)


def test_a_damaged_block_of_the_cache_is_fetched_again(here: Path, tmp_path: Path) -> None:
    write_long(here / 'long')
    keys = f'data.corpus=file://{here}/long', *IDS
    before = load_data(config(*keys)).train[0]
    for path in blocks(tmp_path):
        content = bytearray(path.read_bytes())
        content[::5] = bytes(len(content[::5]))
        path.write_bytes(content)
    folder = (
        f'run.data_cache={tmp_path}/here/../cache/megajax/corpora'  # as another process opens it
    )
    assert_equal(before, load_data(config(*keys, folder)).train[0])


def test_the_cache_keeps_to_its_limit(tmp_path: Path) -> None:
    limit = 20 * BLOCK
    cache = BlockCache(tmp_path, limit)
    for number in range(50):
        cache.write('key', number, bytes([number]) * BLOCK)
        assert cache.read('key', number, 0, BLOCK) == bytes([number]) * BLOCK
        assert cache.read('key', number, 5, 8) == bytes([number]) * 3
        assert cache.read('key', 0, 5, 8) == bytes(3)  # which is in use
    assert sum(path.stat().st_size for path in tmp_path.rglob('*') if path.is_file()) <= limit
    assert cache.read('key', 5, 0, BLOCK) is None


def test_transient_errors_are_retried_and_named_in_the_end(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_file, 'FIRST_WAIT', 0.01)
    write_long(here / 'long')
    with stores.web(here) as server, caplog.at_level(logging.WARNING):
        remote = load_data(config(f'data.corpus={server.url}/long', *IDS))
        server.failures = 3
        batch = remote.train[5]
        assert 'trying again in 0.0 s' in caplog.text
        assert server.failures == 0
        monkeypatch.setattr(remote_file, 'IN_RUN', 0.1)
        server.failures = 1000
        with pytest.raises(UnreachableError, match=r'long\.bin: cannot be read after 0 s') as error:
            list(map(remote.train.__getitem__, range(100)))
        assert error.value.exit_code == 75
    monkeypatch.setattr(remote_file, 'AT_START', 0.1)
    with pytest.raises(ConfigError, match=r'data\.corpus: http:.*/long\.idx: cannot be read: '):
        load_data(config(f'data.corpus={server.url}/long', *IDS))
    local = load_data(config(f'data.corpus={here}/long', *IDS))
    assert_equal(local.train[5], batch)


def test_a_changed_file_ends_the_run_that_reads_it_and_has_another_fingerprint(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, 'LOOK_EVERY', 0.0)
    write_long(here / 'long')
    keys = f'data.corpus=memory://{tmp_path.name}/long', *IDS
    with stores.memory(tmp_path.name) as url:
        stores.copy(here, url)
        remote = load_data(config(*keys))
        kept = set(blocks(tmp_path))
        stores.copy(here, url)  # written again
        with pytest.raises(
            ConfigError, match=r'long\.bin: has changed while the run was reading it'
        ):
            list(map(remote.train.__getitem__, range(100)))
        assert set(blocks(tmp_path)) <= kept
        now = load_data(config(*keys))
    changed = {
        name for name, value in now.fingerprints.items() if value != remote.fingerprints[name]
    }
    assert changed == {f'ETag and size of {url}/long.{suffix}' for suffix in ('bin', 'idx')}


@pytest.mark.parametrize(
    ('missing', 'message'),
    [
        ('bin', 'data.corpus: {}/web.bin: there is no such file'),
        ('idx', 'data.corpus: {}/web.idx: there is no such file'),
        ('tokenizer.json', 'data.corpus: {}/web.tokenizer.json: is missing, and web.json names it'),
        ('json', 'data.tokenizer: no tokenizer is known: there is no {}/web.json'),
    ],
)
def test_a_missing_file_is_named_with_its_key(
    here: Path, there: str, missing: str, message: str
) -> None:
    fsspec.open(f'{there}/web.{missing}').fs.rm(f'{there}/web.{missing}')
    with pytest.raises(ConfigError) as error:
        load_data(config(f'data.corpus={there}/web'))
    assert str(error.value).startswith(message.format(there))


@pytest.mark.parametrize('order', ['stateless', 'streamed'])
def test_a_glob_of_token_files_is_not_read_as_text(here: Path, there: str, order: str) -> None:
    keys = f'data.corpus={there}/*', f'data.order={order}'
    message = r'/\* contains token files .* prefix, data\.corpus=\w+://.*/web, or move'
    with pytest.raises(ConfigError, match=message):
        load_data(config(*keys))
    lines = [json.dumps({'text': f'line {i} ' * 99}) for i in range(400)]
    with fsspec.open(f'{there}/web.jsonl', 'w') as file:
        file.write('\n'.join(lines))
    assert load_data(config(*keys)).train[0]


def test_ids_outside_the_vocabulary_are_found_by_the_manifest_or_when_they_are_read(
    here: Path,
) -> None:
    with pytest.raises(ConfigError, match=r'model\.vocab_size: 100 ids end below 264, the largest'):
        load_data(config(f'data.corpus=file://{here}/web', *IDS, 'model.vocab_size=100'))
    (here / 'web.json').unlink()
    with pytest.raises(ConfigError, match=r'web\.bin: at byte \d+: model.vocab_size: 100 ids end'):
        load_data(config(f'data.corpus=file://{here}/web', *IDS, 'model.vocab_size=100')).train[0]


def test_a_manifest_of_other_files_is_named(here: Path) -> None:
    manifest = json.loads((here / 'web.json').read_text())
    (here / 'web.json').write_text(json.dumps(manifest | {'tokens': 7}))
    url = f'file://{here}/web'
    message = rf'data\.corpus: {url}\.json: tokens is 7, but the files have'
    with pytest.raises(ConfigError, match=message):
        load_data(config(f'data.corpus={url}', *IDS))


def test_ids_that_the_tokenizer_lacks_are_found_when_they_are_read(here: Path) -> None:
    (here / 'web.json').unlink()
    keys = f'data.corpus=file://{here}/web', 'data.tokenizer=bytes', 'model.vocab_size=300'
    message = r'data\.tokenizer: bytes has 257 tokens, but the corpus has token 2[56]\d in file:'
    with pytest.raises(ConfigError, match=message):
        load_data(config(*keys)).validation[0]


def test_a_folder_that_cannot_be_written_is_no_cache(here: Path, tmp_path: Path) -> None:
    (tmp_path / 'file').write_text('')
    keys = f'data.corpus=file://{here}/web', f'run.data_cache={tmp_path}/file/cache'
    with pytest.raises(ConfigError, match=r'run\.data_cache: .*/file/cache cannot be written'):
        load_data(config(*keys))
