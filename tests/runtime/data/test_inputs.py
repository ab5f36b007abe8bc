"""Units are the input, cut at line ends; reading goes on at any of them; what cannot be read is
named.
"""

import gzip
import os
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
import zstandard
from ordinary_user import as_ordinary_user
from pyarrow import parquet

from megajax.core.config import ConfigError
from megajax.core.config.extras import install
from megajax.runtime.data.sources.decompress import decompress, open_input
from megajax.runtime.data.sources.inputs import Format, find_inputs
from megajax.runtime.data.sources.pieces import InputPiece, Position, Unit
from megajax.runtime.data.sources.read import read_units
from megajax.runtime.data.text.tokenizer import train_bpe

LINES = b''.join(b'{"text": "%s"}\n' % (b'line %d ' % i * (i % 40)) for i in range(300))
CODE = ''.join(f'def function_{i}(x):\n    if x:\n        return x + {i}\n\n\n' for i in range(200))


def zstd(data: bytes) -> bytes:
    """Two frames, as pzstd and concatenation leave them."""
    half = len(data) // 2
    return b''.join(
        zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])
    )


WRITERS: dict[str, Callable[[bytes], bytes]] = {'': bytes, '.gz': gzip.compress, '.zst': zstd}


def write(folder: Path, name: str, data: bytes) -> str:
    (folder / name).write_bytes(
        WRITERS[Path(name).suffix if Path(name).suffix in WRITERS else ''](data)
    )
    return str(folder / name)


def write_parquet(path: Path, rows: list[object], key: str = 'text') -> str:
    parquet.write_table(pyarrow.table({key: rows}), path, row_group_size=100)
    return str(path)


def units(
    *paths: str, unit: int, start: Position | None = None, format: Format | None = None
) -> list[Unit]:
    return list(read_units(find_inputs(paths, format), 'text', start or Position(), unit))


def pieces(found: list[Unit]) -> list[InputPiece]:
    return [piece for unit in found for piece in unit.pieces]


def content(found: list[Unit]) -> list[bytes | None]:
    """Bytes as one, rows as they are."""
    data = [piece.data for piece in pieces(found)]
    texts = b''.join(part for part in data if isinstance(part, bytes))
    return [texts, *(row for part in data if isinstance(part, list) for row in part)]


@pytest.mark.parametrize('suffix', WRITERS)
@pytest.mark.parametrize('unit', [1, 100, 5000, len(LINES) - 1, len(LINES), 10**6])
def test_units_are_whole_lines_and_together_the_file(
    suffix: str, unit: int, tmp_path: Path
) -> None:
    found = units(write(tmp_path, f'a.jsonl{suffix}', LINES), unit=unit)
    assert content(found) == [LINES]
    for piece in pieces(found):
        assert isinstance(piece.data, bytes)
        assert len(piece.data) <= max(unit, LINES.find(b'\n', piece.offset) + 1 - piece.offset)
        assert piece.data.endswith(b'\n') or not piece.data
        assert piece.line == 1 + LINES[: piece.offset].count(b'\n')


def test_reading_goes_on_after_any_unit(tmp_path: Path) -> None:
    paths = [write(tmp_path, f'{i}.jsonl{suffix}', LINES) for i, suffix in enumerate(WRITERS)]
    paths += [
        write_parquet(tmp_path / 'a.parquet', [f'row {i} ' * 20 for i in range(250)]),
        write(tmp_path, 'b.txt.gz', CODE.encode()),
    ]
    whole = units(*paths, unit=3000)
    assert len(whole) > 30
    for i in range(0, len(whole), 3):
        assert units(*paths, unit=3000, start=whole[i].after) == whole[i + 1 :]
    read = [unit.after.read for unit in whole]
    assert read == sorted(read)
    assert read[-1] == sum(os.path.getsize(path) for path in paths)


@pytest.mark.parametrize('unit', [200, 999, 4096])
def test_a_long_text_is_cut_where_the_tokenizer_cuts(unit: int, tmp_path: Path) -> None:
    found = pieces(
        units(
            write(tmp_path, 'a.txt', CODE.encode()), write(tmp_path, 'b.txt', b'short'), unit=unit
        )
    )
    parts, end = found[:-1], found[-1]
    assert (parts[0].first, parts[-1].last, end.first, end.last) == (True, True, True, True)
    assert not any(before.last or after.first for before, after in pairwise(parts))
    tokenizer = train_bpe([CODE], 400)
    texts = [bytes(piece.data).decode() for piece in parts if isinstance(piece.data, bytes)]
    assert ''.join(texts) == CODE
    assert [i for ids in tokenizer.encode_batch(texts) for i in ids] == list(
        tokenizer.encode_batch([CODE])[0]
    )


def test_rows_keep_their_order_and_nulls(tmp_path: Path) -> None:
    rows: list[object] = [None if i % 7 == 0 else f'é{i}' * (i % 50) for i in range(333)]
    expected = [row.encode() if isinstance(row, str) else None for row in rows]
    assert content(units(write_parquet(tmp_path / 'a.parquet', rows), unit=1000))[1:] == expected


def test_inputs_come_in_the_order_given_and_globs_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ('b.jsonl', 'a.jsonl.gz', 'c.md', 'd[1].parquet'):
        write(tmp_path, name, b'x')
    found = find_inputs(['c.md', '*.jsonl*', 'd[1].parquet', '-'], None)
    expected = [
        ('c.md', 'text'),
        ('a.jsonl.gz', 'jsonl'),
        ('b.jsonl', 'jsonl'),
        ('d[1].parquet', 'parquet'),
        ('-', 'jsonl'),
    ]
    assert [(input.path, input.format) for input in found] == expected
    assert [input.stream for input in found] == [False] * 4 + [True]


@pytest.mark.parametrize(
    'given',
    [
        ('a.jsonl', '*.jsonl'),
        ('*.jsonl', './a.jsonl'),
        ('*.jsonl', '{folder}/a.jsonl'),
        ('linked/a.jsonl', 'a.jsonl'),
        ('-', '-'),
    ],
)
def test_a_file_that_two_inputs_name_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ('a.jsonl', 'b.jsonl'):
        write(tmp_path, name, b'x')
    (tmp_path / 'linked').symlink_to(tmp_path)
    given = given[0], given[1].format(folder=tmp_path)
    first, second = map(re.escape, given)
    message = rf'would be read twice: --input {first} and --input {second} both name it; name it'
    with pytest.raises(ConfigError, match=message):
        find_inputs(given, None)
    with pytest.raises(ConfigError, match=r'^a.jsonl: would be .*, and so would 1 others: '):
        find_inputs(['*.jsonl', '*.jsonl'], None)


@pytest.mark.parametrize(('others', 'warns'), [(['a.jsonl'], True), ([], False), (['b.md'], False)])
def test_a_readme_that_an_unquoted_glob_names_is_read_with_a_warning(
    others: list[str], warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = [write(tmp_path, name, b'x') for name in ('README.md', *others)]
    assert [input.path for input in find_inputs(named, None)] == named
    assert ('README.md: reading it as a document; leave it out' in caplog.text) == warns


def test_all_inputs_that_cannot_be_found_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        find_inputs([f'{tmp_path}/a.jsonl', f'{tmp_path}/*.txt', str(tmp_path)], None)
    first, second, third = str(caught.value).splitlines()
    assert 'a.jsonl: there is no such file' in first
    assert '*.txt: matches no file' in second
    assert 'is a folder; give its files' in third
    with pytest.raises(ConfigError, match=r'--input: names no file'):
        find_inputs([], None)


@pytest.mark.parametrize('name', ['a.jsonl.gz', 'a.jsonl.zst', 'a.parquet'])
@pytest.mark.parametrize('kept', [0, 0.5, 0.99])
def test_a_truncated_file_is_named(name: str, kept: float, tmp_path: Path) -> None:
    path = Path(
        write_parquet(tmp_path / name, ['text'] * 99)
        if name == 'a.parquet'
        else write(tmp_path, name, LINES)
    )
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    with pytest.raises(ConfigError, match=rf'{name}: cannot be read to its end: .*; copy it again'):
        units(str(path), unit=10**6)


def test_a_file_whose_columns_have_no_names_in_utf_8_is_named(tmp_path: Path) -> None:
    path = Path(write_parquet(tmp_path / 'a.parquet', ['a'], key='texts'))
    path.write_bytes(path.read_bytes().replace(b'texts', b't\xffxts'))
    with pytest.raises(ConfigError, match=r'a.parquet: cannot be read to its end: .*utf-8'):
        units(str(path), unit=100)


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in (('a.jsonl.zst', 'zstandard'), ('a.parquet', 'pyarrow')):
        (tmp_path / name).write_bytes(b'x')
        monkeypatch.setitem(sys.modules, module, None)
        message = f'{name}: needs {module}, which is not installed; {install("data")}'
        with pytest.raises(ConfigError, match=re.escape(message)):
            find_inputs([str(tmp_path / name)], None)


def test_a_column_that_is_not_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no column 'text'; set --json-key to one of body"):
        units(write_parquet(tmp_path / 'a.parquet', ['a'], key='body'), unit=100)
    with pytest.raises(ConfigError, match=r"column 'text' is int64, not text"):
        units(write_parquet(tmp_path / 'b.parquet', [1]), unit=100)
    with pytest.raises(ConfigError, match=r"column 'text' is list<.*string>, not text; set --json"):
        units(write_parquet(tmp_path / 'c.parquet', [['a']]), unit=100)


def test_two_columns_of_one_name_are_named(tmp_path: Path) -> None:
    table = pyarrow.table([['a'], ['b']], names=['text', 'text'])
    parquet.write_table(table, tmp_path / 'a.parquet')
    with pytest.raises(ConfigError, match=r"a.parquet: has 2 columns 'text'; leave only one"):
        units(str(tmp_path / 'a.parquet'), unit=100)


def test_a_column_of_few_different_texts_is_read(tmp_path: Path) -> None:
    column = pyarrow.array(['a', 'b', 'a']).dictionary_encode()
    parquet.write_table(pyarrow.table({'text': column}), tmp_path / 'a.parquet')
    assert content(units(str(tmp_path / 'a.parquet'), unit=100)) == [b'', b'a', b'b', b'a']


def test_a_file_that_links_lead_to_again_is_read_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'deep').mkdir()
    (tmp_path / 'deep/a.jsonl').write_text('{"text": "a"}\n')
    (tmp_path / 'deep/loop').symlink_to(tmp_path / 'deep')
    (tmp_path / 'b.jsonl').symlink_to(tmp_path / 'deep/a.jsonl')
    found = find_inputs([f'{tmp_path}/**/*.jsonl'], None)
    assert [input.path for input in found] == [f'{tmp_path}/b.jsonl']
    assert 'matches are links to others' in caplog.text
    with pytest.raises(ConfigError, match=r'deep/a\.jsonl: would be read twice'):
        find_inputs([f'{tmp_path}/b.jsonl', f'{tmp_path}/deep/a.jsonl'], None)


@pytest.mark.parametrize('pattern', ['**/*.jsonl', '*/*.jsonl', '*/a.jsonl'])
def test_a_folder_that_a_glob_cannot_search_is_named(tmp_path: Path, pattern: str) -> None:
    for name in ('open/a.jsonl', 'closed/a.jsonl'):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text('{"text": "a"}\n')
    (tmp_path / 'closed').chmod(0)
    message = f'^{tmp_path}/closed: cannot be read: Permission denied; make it readable, or give a'
    with pytest.raises(ConfigError, match=message):
        as_ordinary_user(lambda: find_inputs([f'{tmp_path}/{pattern}'], None))
    (tmp_path / 'closed').chmod(0o755)


def test_a_bomb_is_decompressed_in_pieces_of_bounded_size(tmp_path: Path) -> None:
    writer = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 24)
    bomb = b''.join(writer.compress(zeros) for _ in range(64)) + writer.flush()
    assert len(bomb) < 1 << 17
    (tmp_path / 'bomb.jsonl.zst').write_bytes(bomb)
    (input,) = find_inputs([str(tmp_path / 'bomb.jsonl.zst')], None)
    tracemalloc.start()
    with open_input(input) as raw, decompress(input, raw) as stream:
        assert stream.read(100) == bytes(100)
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 29


def test_a_pipe_that_nobody_writes_into_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / 'pipe'
    os.mkfifo(path)
    (input,) = find_inputs([str(path)], 'jsonl')
    writer = threading.Thread(target=path.write_text, args=('{"text": "a"}\n',))
    with caplog.at_level('INFO'):
        writer.start()
        with open_input(input) as raw:
            assert raw.read() == b'{"text": "a"}\n'
    writer.join()
    assert f'{path} is a pipe: waiting' in caplog.text
