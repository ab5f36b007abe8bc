"""Token files are what megatron-core writes and reads, and a broken one is refused with the byte
where it breaks.
"""

import io
import re
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megajax.core.config import ConfigError
from megajax.runtime.data.tokens import indexed
from megajax.runtime.data.tokens.indexed import (
    HEADER,
    Sequences,
    from_lengths,
    read_pair,
    write_index,
)

ORACLES = Path(__file__).parent / 'oracles/gpt_dataset'
CHUNKS = [1, 2, 3, indexed.CHUNK]


def index_bytes(dtype: type, lengths: list[int], documents: list[int]) -> bytes:
    file = io.BytesIO()
    write_index(file, np.dtype(dtype), np.array(lengths, np.int32), np.array(documents, np.int64))
    return file.getvalue()


def write_pair(
    prefix: Path,
    lengths: list[int],
    documents: list[int] | None = None,
    dtype: type = np.uint16,
    extra: bytes = b'',
) -> Path:
    tokens = np.arange(sum(lengths), dtype=dtype)
    Path(f'{prefix}.bin').write_bytes(tokens.tobytes())
    Path(f'{prefix}.idx').write_bytes(
        index_bytes(dtype, lengths, documents or list(range(len(lengths) + 1))) + extra
    )
    return prefix


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path / 'web', [3, 0, 4, 2], [0, 2, 2, 4])


@pytest.mark.parametrize('chunk', CHUNKS)
@pytest.mark.parametrize('name', ['a', 'b', 'c'])
def test_what_megatron_wrote_is_written_again_byte_for_byte(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, 'CHUNK', chunk)
    found = read_pair(ORACLES / name)
    written = io.BytesIO()
    write_index(written, found.tokens.dtype, found.lengths, found.documents)
    assert written.getvalue() == (ORACLES / f'{name}.idx').read_bytes()
    assert found.tokens.tobytes() == (ORACLES / f'{name}.bin').read_bytes()


@given(
    lengths=st.lists(st.integers(0, 40)),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32]),
    chunk=st.sampled_from(CHUNKS),
    data=st.data(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    dtype: type,
    chunk: int,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(indexed, 'CHUNK', chunk)
    inner = sorted(data.draw(st.lists(st.integers(0, len(lengths)))))
    prefix = write_pair(tmp_path / 'x', lengths, [0, *inner, len(lengths)], dtype)
    found = read_pair(prefix)
    assert found.tokens.tolist() == np.arange(sum(lengths), dtype=dtype).tolist()
    assert found.lengths.tolist() == lengths
    assert found.documents.tolist() == [0, *inner, len(lengths)]
    assert [found.start(i) for i in range(len(lengths) + 1)] == [0, *np.cumsum(lengths)]


def test_modes_are_passed_over(tmp_path: Path) -> None:
    found = read_pair(write_pair(tmp_path / 'x', [3, 4], extra=b'\0\1'))
    assert (found.lengths.tolist(), found.documents.tolist()) == ([3, 4], [0, 1, 2])


def test_files_are_mapped_and_not_read(pair: Path) -> None:
    found = read_pair(pair)
    for array in (found.tokens, found.lengths, found.pointers, found.documents):
        while not isinstance(array, np.memmap):
            assert array.base is not None
            array = array.base


@given(lengths=st.lists(st.integers(0, 5), min_size=1), data=st.data())
def test_document_starts_are_those_inside(lengths: list[int], data: st.DataObject) -> None:
    sequences = from_lengths('x', np.zeros(sum(lengths), np.uint16), np.array(lengths))
    start = data.draw(st.integers(0, sum(lengths)))
    stop = data.draw(st.integers(start, sum(lengths)))
    begins = {sequences.start(i) for i, length in enumerate(lengths) if length}
    assert sequences.document_starts(start, stop) == sorted(
        token for token in begins if start < token < stop
    )


def test_a_document_of_several_sequences_begins_with_its_first(pair: Path) -> None:
    assert read_pair(pair).document_starts(0, 9) == [3]


def patched(content: bytes, at: int, kind: str, value: int) -> bytes:
    return content[:at] + struct.pack(kind, value) + content[at + struct.calcsize(kind) :]


LENGTHS, POINTERS, DOCUMENTS = (
    HEADER.size,
    HEADER.size + 16,
    HEADER.size + 48,
)  # of the fixture's four sequences


@pytest.mark.parametrize(
    ('break_index', 'message'),
    [
        (lambda b: b'', r'web.idx: has 0 bytes, and the header alone has 34'),
        (lambda b: b[:20], r'web.idx: has 20 bytes, and the header alone has 34'),
        (lambda b: b'P' + b[1:], r"web.idx: at byte 0: b'PMIDIDX.*' instead of b'MMIDIDX"),
        (
            lambda b: patched(b, 9, '<Q', 2),
            r'web.idx: at byte 9: version 2, but only version 1 is supported; copy it again',
        ),
        (
            lambda b: patched(b, 17, '<B', 9),
            r'web.idx: at byte 17: 9 is not a dtype of tokens; known are 1 \(uint8\)',
        ),
        (lambda b: patched(b, 17, '<B', 7), r'web.idx: at byte 17: 7 is not a dtype'),
        (
            lambda b: b[:-3],
            (
                r'web.idx: has 111 bytes, and 4 sequences and 4 document boundaries \(bytes 18 '
                r'and 26\) need 114'
            ),
        ),
        (
            lambda b: patched(b, 18, '<Q', 2**63),
            r'web.idx: has 114 bytes, and 9223372036854775808 sequences',
        ),
        (
            lambda b: patched(b, LENGTHS + 8, '<i', -4),
            r'at byte 42: sequence 2 has -4 tokens, fewer than 0',
        ),
        (
            lambda b: patched(b, POINTERS + 8, '<q', -6),
            r'at byte 58: sequence 1 begins at byte -6, and the lengths before it add up to 6',
        ),
        (
            lambda b: patched(b, POINTERS + 24, '<q', 6),
            r'at byte 74: sequence 3 begins at byte 6, and the lengths before it add up to 14',
        ),
        (
            lambda b: patched(b, LENGTHS + 12, '<i', 5),
            r'web.bin: has 18 bytes, and the lengths in web.idx add up to 24: 6 too few',
        ),
        (
            lambda b: patched(b, LENGTHS + 12, '<i', 1),
            r'web.bin: has 18 bytes, and the lengths in web.idx add up to 16: 2 too many',
        ),
        (
            lambda b: patched(b, DOCUMENTS, '<q', 1),
            r'at byte 82: the document boundaries do not begin with 0',
        ),
        (
            lambda b: patched(b, DOCUMENTS + 16, '<q', 1),
            r'at byte 98: document 2 begins with sequence 1, before document 1',
        ),
        (
            lambda b: patched(b, DOCUMENTS + 24, '<q', 3),
            r'at byte 106: the documents end with sequence 3, and there are 4',
        ),
    ],
)
@pytest.mark.parametrize('chunk', CHUNKS)
def test_a_broken_index_is_refused_with_its_byte(
    pair: Path, break_index: Any, message: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed, 'CHUNK', chunk)
    idx = Path(f'{pair}.idx')
    idx.write_bytes(break_index(idx.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        read_pair(pair)


@pytest.mark.parametrize('missing', ['bin', 'idx'])
def test_half_a_pair(pair: Path, missing: str) -> None:
    Path(f'{pair}.{missing}').unlink()
    with pytest.raises(
        ConfigError, match=rf'web: there is no web.{missing}; give the prefix of two files'
    ):
        read_pair(pair)


Change = tuple[str, int, bytes]
mutations = st.one_of(
    st.tuples(st.just('byte'), st.integers(0, 10**6), st.binary(min_size=1, max_size=8)),
    st.tuples(st.just('cut'), st.integers(0, 10**6), st.just(b'')),
    st.tuples(st.just('insert'), st.integers(0, 10**6), st.binary(min_size=1, max_size=40)),
)


@pytest.mark.slow
@given(st.sampled_from('abc'), st.lists(mutations, min_size=1, max_size=4))
@settings(
    max_examples=2500, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_mutation_of_an_index_crashes_hangs_or_reads_past_its_tokens(
    tmp_path: Path, name: str, changes: list[tuple[str, int, bytes]]
) -> None:
    content = bytearray((ORACLES / f'{name}.idx').read_bytes())
    for kind, place, new in changes:
        at = place % (len(content) + 1)
        if kind == 'cut':
            del content[at:]
        else:
            content[at : at + (len(new) if kind == 'byte' else 0)] = new
    if not (tmp_path / f'{name}.bin').exists():
        shutil.copy(ORACLES / f'{name}.bin', tmp_path)
    (tmp_path / f'{name}.idx').write_bytes(content)
    with suppress(ConfigError):
        read_everything(read_pair(tmp_path / name))


def read_everything(found: Sequences) -> None:
    """Every sequence lies inside the tokens, one after the other."""
    bounds = [found.start(i) for i in range(len(found) + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == len(found.tokens) == int(found.lengths.sum(dtype=np.int64))
    assert all(
        stop - start == length
        for start, stop, length in zip(bounds[:-1], bounds[1:], found.lengths, strict=True)
    )
    assert (found.documents >= 0).all()
    assert (found.documents <= len(found)).all()
    assert found.document_starts(0, len(found.tokens)) == sorted(
        set(found.document_starts(0, len(found.tokens)))
    )


@pytest.mark.parametrize('documents', [[[5, 6], [7], []], [[1, 2, 3]], [[]]])
@pytest.mark.parametrize('is_ended', [False, True])
def test_the_page_on_data_makes_a_pair_of_an_array_of_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: list[list[int]], is_ended: bool
) -> None:
    page = (Path(__file__).parents[3] / 'docs/data.md').read_text()
    (code,) = re.findall(r'^```python\n(.*?)^```$', page, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    ended = [[*ids, 50256] for ids in documents]
    if not is_ended:
        ended[-1] = [*ended[-1], 8]
    np.concatenate(ended).astype(np.uint16).tofile('train.bin')
    exec(code, {})
    found = read_pair('train')
    split = np.split(found.tokens, np.cumsum(found.lengths)[:-1])
    expected = ended if is_ended else [*ended[:-1], ended[-1][:-1], [8]]
    assert [ids.tolist() for ids in split] == expected
    assert found.documents.tolist() == list(range(len(expected) + 1))


def test_a_relative_prefix_that_is_not_there_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'train.bin').write_bytes(b'ab')
    with pytest.raises(ConfigError, match=rf'there is no train.idx in {tmp_path}; .*write train.i'):
        read_pair('train')
    with pytest.raises(ConfigError, match=rf'no web.bin and no web.idx in {tmp_path}/more; give'):
        read_pair('more/web')
