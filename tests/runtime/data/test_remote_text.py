"""Text, JSON lines and Parquet with a URL give the batches that they give on the disk."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime.data import stores
from runtime.data.test_inputs import write_parquet
from runtime.data.test_load import assert_equal, config

from megajax.core.config import ConfigError
from megajax.runtime.data import load_data


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


@pytest.fixture
def there(here: Path) -> Iterator[str]:
    with stores.memory(here.parent.name) as url:
        stores.copy(here, url)
        yield url


def check_the_same(local: str, remote: str) -> None:
    one, other = (
        load_data(config(f'data.corpus={corpus}', 'train.eval_batches=1'))
        for corpus in (local, remote)
    )
    for step in (0, 1, 7):
        assert_equal(one.train[step], other.train[step])
    assert_equal(one.validation[0], other.validation[0])
    assert one.tokenizer.fingerprint == other.tokenizer.fingerprint
    assert other.fingerprints[remote] == one.fingerprints[local]


@pytest.mark.parametrize('name', ['a.jsonl', 'c.parquet', 'chat.jsonl', 'd.txt'])
def test_a_remote_file_has_the_batches_of_the_file(here: Path, there: str, name: str) -> None:
    check_the_same(f'{here}/{name}', f'{there}/{name}')


def test_a_glob_has_the_batches_of_the_folder(here: Path, there: str) -> None:
    (here / 'chat.jsonl').unlink()
    check_the_same(str(here), f'{there}/[abc].*')


def test_a_changed_file_has_another_version(here: Path, there: str) -> None:
    key = f'data.corpus={there}/c.parquet'
    before, again = load_data(config(key)), load_data(config(key))
    assert before.fingerprints == again.fingerprints
    stores.copy(here, there)  # written again
    changed = before.fingerprints.items() ^ load_data(config(key)).fingerprints.items()
    assert {name for name, _ in changed} == {f'ETag and size of {there}/c.parquet'}


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
