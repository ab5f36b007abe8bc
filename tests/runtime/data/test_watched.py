"""What somebody does to token files while a run reads them is found, named with file and byte, and
never trained on.
"""

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from megajax.core.config import ConfigError
from megajax.runtime.data.tokens import watched as module
from megajax.runtime.data.tokens.indexed import Sequences, read_pair, write_index
from megajax.runtime.data.tokens.watched import watched

VOCAB = 300
COUNT = 10_000
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]


def write_pair(prefix: Path, dtype: type = np.uint16) -> np.ndarray:
    tokens = (np.arange(COUNT) % 100).astype(dtype)
    Path(f'{prefix}.bin').write_bytes(tokens.tobytes())
    with Path(f'{prefix}.idx').open('wb') as file:
        write_index(
            file, np.dtype(dtype), np.full(COUNT // 10, 10, np.int32), np.arange(COUNT // 10 + 1)
        )
    return tokens


def write_token(path: Path, number: int, token: int, dtype: type) -> None:
    content = np.array([token], dtype).tobytes()
    with path.open('r+b') as file:
        file.seek(number * len(content))
        file.write(content)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and time are looked at before each read."""
    monkeypatch.setattr(module, 'LOOK_EVERY', 0.0)


@pytest.fixture
def opened(tmp_path: Path) -> Sequences:
    write_pair(tmp_path / 'x')
    return watched(read_pair(tmp_path / 'x'), VOCAB)


@pytest.mark.parametrize('dtype', DTYPES)
def test_what_is_read_is_what_the_file_holds(tmp_path: Path, dtype: type) -> None:
    tokens = write_pair(tmp_path / 'x', dtype)
    sequences = watched(read_pair(tmp_path / 'x'), VOCAB)
    for start, stop in ((0, 0), (0, 1), (17, 4711), (COUNT - 3, COUNT), (COUNT - 3, COUNT + 9)):
        np.testing.assert_array_equal(sequences.read(start, stop), tokens[start:stop])


@pytest.mark.parametrize(
    ('dtype', 'token'),
    [(np.uint16, VOCAB), (np.int16, -1), (np.int32, VOCAB), (np.int64, 2**32), (np.int8, -128)],
)
def test_an_id_outside_the_vocabulary_is_named_with_its_byte(
    tmp_path: Path, dtype: type, token: int
) -> None:
    write_pair(tmp_path / 'x', dtype)
    sequences = watched(read_pair(tmp_path / 'x'), VOCAB)
    write_token(tmp_path / 'x.bin', 777, token, dtype)
    sequences.read(0, 777)
    sequences.read(778, COUNT)
    size = np.dtype(dtype).itemsize
    with pytest.raises(
        ConfigError,
        match=rf'x\.bin: at byte {777 * size}: token 777 is {token}, but the model has {VOCAB} ids',
    ):
        sequences.read(700, 800)


def test_a_file_that_is_cut_short_says_so_where_it_ends(tmp_path: Path, opened: Sequences) -> None:
    os.truncate(tmp_path / 'x.bin', 1000)
    assert len(opened.read(400, 500)) == 100
    with pytest.raises(
        ConfigError,
        match=rf'x\.bin: ends before byte 1002, but had {2 * COUNT} bytes when it was opened',
    ):
        opened.read(400, 501)


@pytest.mark.usefixtures('looks')
@pytest.mark.parametrize('suffix', ['bin', 'idx'])
def test_another_size_is_seen_before_anything_is_read(
    tmp_path: Path, opened: Sequences, suffix: str
) -> None:
    os.truncate(tmp_path / f'x.{suffix}', 1000)
    with pytest.raises(
        ConfigError, match=rf'x\.{suffix}: has 1000 bytes, but had \d+ when it was opened'
    ):
        opened.read(0, 10)


@pytest.mark.usefixtures('looks')
def test_other_tokens_of_the_vocabulary_are_seen_too(tmp_path: Path, opened: Sequences) -> None:
    write_token(tmp_path / 'x.bin', 3, 99, np.uint16)
    os.utime(tmp_path / 'x.bin', (1, 1))
    with pytest.raises(ConfigError, match=r'x\.bin: was written to'):
        opened.read(5000, 5010)


@pytest.mark.usefixtures('looks')
def test_a_file_that_was_touched_is_named_once_and_read_on(
    tmp_path: Path, opened: Sequences, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for time in (1, 2, 3):
            os.utime(tmp_path / 'x.bin', (time, time))
            assert opened.read(0, 3).tolist() == [0, 1, 2]
    assert [record.message.partition(' while')[0] for record in caplog.records] == [
        f'{tmp_path}/x.bin was touched'
    ]


@pytest.mark.usefixtures('looks')
def test_a_file_whose_name_another_takes_is_read_to_the_end(
    tmp_path: Path, opened: Sequences
) -> None:
    (tmp_path / 'new').write_bytes(b'\xff' * 12)
    (tmp_path / 'new').replace(tmp_path / 'x.bin')
    (tmp_path / 'x.idx').unlink()
    assert opened.read(0, COUNT).tolist() == [i % 100 for i in range(COUNT)]
