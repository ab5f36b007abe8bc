"""The shares of a corpus have each of its texts exactly once, in every format."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.data.test_inputs import write_parquet

from megajax.base.errors import ConfigError
from megajax.runtime.data.sources import shares as module
from megajax.runtime.data.sources.inputs import find_inputs
from megajax.runtime.data.sources.shares import MOST, Shares
from megajax.runtime.data.text.corpus import FIXES

TEXTS = [f'text {i} ' * (i % 7 + 1) + 'é\n' * (i % 3) for i in range(200)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a few lines."""
    monkeypatch.setattr(module, 'SMALLEST', 100)


def shares_of(*paths: Path) -> Shares:
    inputs = {path.name: find_inputs([str(path)], None)[0] for path in paths}
    return Shares(inputs, FIXES)


def texts_of(shares: Shares) -> list[str]:
    return [text for number in range(len(shares)) for text in shares.texts(number)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_bytes('\n'.join(json.dumps({'text': text}) for text in texts).encode())
    return path


def test_json_lines_are_shared_by_bytes(tmp_path: Path) -> None:
    shares = shares_of(write_lines(tmp_path / 'a.jsonl', TEXTS))
    assert len(shares) > 50
    assert texts_of(shares) == TEXTS


def test_a_compressed_file_is_shared_by_blocks(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / 'a.jsonl', TEXTS)
    packed = tmp_path / 'a.jsonl.gz'
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    shares = shares_of(packed)
    assert 4 < len(shares) <= MOST
    assert Counter(texts_of(shares)) == Counter(TEXTS)
    sizes = [len(list(shares.texts(number))) for number in range(len(shares))]
    assert 0 < min(sizes) <= max(sizes) < len(TEXTS) / 2


def test_parquet_is_shared_by_rows_of_its_groups(tmp_path: Path) -> None:
    write_parquet(tmp_path / 'a.parquet', TEXTS)
    shares = shares_of(tmp_path / 'a.parquet')
    assert len(shares) > 4
    assert texts_of(shares) == TEXTS


def test_a_share_of_parquet_keeps_no_file_open(tmp_path: Path) -> None:
    write_parquet(tmp_path / 'a.parquet', TEXTS)
    shares = shares_of(tmp_path / 'a.parquet')
    begun = [shares.texts(number) for number in range(4)]
    before = len(os.listdir('/proc/self/fd'))
    assert [next(texts) for texts in begun]
    assert len(os.listdir('/proc/self/fd')) == before


def test_a_text_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    (tmp_path / 'a.txt').write_text('one line of a text\n' * 100)
    texts = texts_of(shares_of(tmp_path / 'a.txt'))
    assert len(texts) > 10
    assert ''.join(texts) == 'one line of a text\n' * 100
    assert all(text.endswith('text\n') for text in texts)


@given(
    lines=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    end=st.sampled_from(['', '\n', '\n\n']),
    mark=st.booleans(),
    unit=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_however_long_lines_and_shares_are_each_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], end: str, mark: bool, unit: int
) -> None:
    path = tmp_path_factory.mktemp('lines') / 'a.jsonl'
    texts = [f'{i}' * length for i, length in enumerate(lines)]
    content = '\n'.join(json.dumps({'text': text}) for text in texts) + end
    path.write_bytes(b'\xef\xbb\xbf' * mark + content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'SMALLEST', unit)
        assert texts_of(shares_of(path)) == texts


@given(
    words=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    gap=st.sampled_from(['', ' ', '\n', '\r\n']),
    unit=st.integers(1, 400),
)
@settings(max_examples=60, deadline=None)
def test_however_long_words_are_a_text_is_cut_between_characters(
    tmp_path_factory: pytest.TempPathFactory, words: list[int], gap: str, unit: int
) -> None:
    path = tmp_path_factory.mktemp('words') / 'a.txt'
    content = gap.join('aé漢😀' * length for length in words) or 'a'
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'SMALLEST', unit)
        patch.setattr(module, 'HEAD', 64)
        shares = shares_of(path)
        texts = texts_of(shares)
        assert ''.join(texts) == content
        assert max(map(len, texts)) <= unit + 64


def test_a_line_that_is_too_long_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, 'MAX_LINE_BYTES', 1000)
    with pytest.raises(ConfigError, match='has a line of more than'):
        texts_of(shares_of(write_lines(tmp_path / 'a.jsonl', ['x' * 2000])))


@pytest.mark.parametrize('change', [lambda data: data[:-9], lambda data: data + b' '])
def test_a_file_whose_size_changes_is_not_read_on(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    path = write_lines(tmp_path / 'a.jsonl', TEXTS)
    shares = shares_of(path)
    assert list(shares.texts(0))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match='has changed since the run began'):
        list(shares.texts(1))


def test_files_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    paths = [write_lines(tmp_path / f'{name}.jsonl', [name]) for name in 'cab']
    assert texts_of(shares_of(*paths)) == ['a', 'b', 'c']


def test_an_empty_file_has_no_share(tmp_path: Path) -> None:
    (tmp_path / 'empty.jsonl').touch()
    assert len(shares_of(tmp_path / 'empty.jsonl')) == 0


@pytest.mark.parametrize(
    ('name', 'content'), [('a.bin', bytes(1000)), ('a.gz', gzip.compress(bytes(1000), mtime=0))]
)
def test_among_texts_a_file_that_is_not_text_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / 'a.txt').write_text('text')
    assert texts_of(shares_of(tmp_path / name, tmp_path / 'a.txt')) == ['text']
    (message,) = caplog.messages
    assert message == f'data.corpus: not reading {tmp_path}/{name}, which is not text'
    with pytest.raises(ConfigError, match='is binary'):
        texts_of(shares_of(tmp_path / name))


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{"text": 1}', "'text' is 1, not text; fix it, or use megajax data build"),
        ('{"text": "cut', 'is not JSON'),
        ('{"body": "x"}', "has no key 'text' (its keys: body)"),
    ],
)
def test_a_bad_line_is_named_by_its_byte(tmp_path: Path, line: str, said: str) -> None:
    good = json.dumps({'text': 'x' * 50}) + '\n'
    path = tmp_path / 'a.jsonl'
    path.write_text(good * 9 + line + '\n' + good * 9)
    with pytest.raises(ConfigError) as found:
        texts_of(shares_of(path))
    assert f'{path}: byte {9 * len(good)}: {said}' in str(found.value)
