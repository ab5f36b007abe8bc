"""Megatron's token files: concatenated token ids in PREFIX.bin, and their index in PREFIX.idx.

PREFIX.idx, little-endian, has a header (magic, version, dtype code, number of sequences, number of
document boundaries), followed by:

    lengths             int32 [sequences], in tokens
    pointers            int64 [sequences], in bytes
    document boundaries int64 [boundaries], as sequence numbers
    modes               int8 [sequences], optional

This is the format of megatron-core's `indexed_dataset.py`. A document has any number of sequences,
usually one.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from megajax.base.errors import mistake
from megajax.base.files.exists import exists, is_file
from megajax.base.files.outputs import url_of

MAGIC = b'MMIDIDX\x00\x00'
VERSION = 1
HEADER = struct.Struct('<9sQBQQ')
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}

CHUNK = 1 << 20  # maximum entries that a check holds in memory


class TokenIds(Protocol):
    """The token ids of a file: an array, or parts of a remote file (`remote_pair.py`)."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """The token ids of consecutive sequences, in memory, mapped from files, or remote."""

    name: str  # name in error messages, the prefix of files
    tokens: TokenIds  # [tokens], token ids
    lengths: np.ndarray  # int32 [sequences], tokens of each sequence
    pointers: np.ndarray  # int64 [sequences], byte of `tokens` at which each sequence begins
    # int64 [documents + 1], first sequence of each document, and finally the number of sequences
    documents: np.ndarray
    reader: Callable[[int, int], np.ndarray] | None = None  # used by `read` in place of `tokens`

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the token ids from `start` up to `stop`, or up to the end, for a batch."""
        stop = min(stop, len(self.tokens))
        return self.tokens[start:stop] if self.reader is None else self.reader(start, stop)

    def start(self, sequence: int) -> int:
        """Return the first token of a sequence; after the last sequence, the number of tokens."""
        return (
            int(self.pointers[sequence]) // self.tokens.itemsize
            if sequence < len(self)
            else len(self.tokens)
        )

    def document_starts(self, start: int, stop: int) -> list[int]:
        """Return the tokens after `start` and before `stop` with which a document begins."""
        # bisect: numpy would copy the mapped arrays, because they are not aligned
        first, last = (
            bisect_right(self.pointers, token * self.tokens.itemsize) for token in (start, stop - 1)
        )
        documents = self.documents[
            bisect_right(self.documents, first - 1) : bisect_right(self.documents, last - 1)
        ]
        return sorted({self.start(int(sequence)) for sequence in documents} - {start})

    def sequence_starts(self, start: int, stop: int) -> list[int]:
        """Return the tokens after `start` and before `stop` with which a sequence begins."""
        first, last = (
            bisect_right(self.pointers, token * self.tokens.itemsize) for token in (start, stop - 1)
        )
        return sorted({self.start(sequence) for sequence in range(first, last)} - {start})

    def fingerprint(self) -> str:
        """Return a hash that differs between corpora, and is quick to compute for any size.

        It covers the sizes, and the first and last million tokens and lengths.
        """
        sizes = f'{self.tokens.dtype.name} {len(self.tokens)} {len(self)} {len(self.documents)}'
        digest = sha256(sizes.encode())
        for array in (self.tokens, self.lengths):
            digest.update(array[:CHUNK].tobytes())
            digest.update(array[-CHUNK:].tobytes())
        return digest.hexdigest()


def from_lengths(name: str, tokens: np.ndarray, lengths: np.ndarray) -> Sequences:
    """Make sequences of these lengths from tokens in memory, each a document."""
    ends = np.cumsum(lengths, dtype=np.int64)
    pointers = (ends - lengths) * tokens.itemsize
    documents = np.arange(len(lengths) + 1, dtype=np.int64)
    return Sequences(
        name=name,
        tokens=tokens,
        lengths=lengths.astype(np.int32),
        pointers=pointers,
        documents=documents,
    )


def is_pair(prefix: str | Path) -> bool:
    """Whether PREFIX names token files.

    One of the two files suffices, so that the other one is reported as missing.
    """
    prefix = Path(prefix).expanduser()
    exists(prefix)  # an error names the path that the user gave
    return any(map(exists, paths(prefix)))


def prefixes_among(names: Collection[str]) -> list[str]:
    """Return the prefixes of which both token files are among paths or URLs, sorted."""
    prefixes = {name.removesuffix('.idx') for name in names if name.endswith('.idx')}
    return sorted(prefix for prefix in prefixes if f'{prefix}.bin' in names)


def is_index(path: str | Path) -> bool:
    """Whether a file begins as PREFIX.idx does; other programs use these suffixes, too."""
    with Path(path).open('rb') as file:
        return file.read(len(MAGIC)) == MAGIC


def paths(prefix: str | Path) -> tuple[Path, Path]:
    """Return the paths PREFIX.bin and PREFIX.idx."""
    return Path(f'{prefix}.bin'), Path(f'{prefix}.idx')


def read_pair(prefix: str | Path) -> Sequences:
    """Map a pair of files into memory and check its whole index.

    Raises ConfigError with file, byte and fix.
    """
    prefix = Path(prefix).expanduser()
    bin_path, idx_path = paths(prefix)
    if missing := [path.name for path in (bin_path, idx_path) if not is_file(path)]:
        if url := url_of(prefix):
            raise mistake(url, 'is a URL; copy the files to this machine, and give their prefix')
        fix = 'give the prefix of two files, either copied or built with megajax data build'
        if missing == [idx_path.name]:
            fix += f'; if {bin_path.name} is an array of ids alone, as nanoGPT writes it, '
            fix += f'docs/data.md shows how to write {idx_path.name}'
        here = '' if prefix.is_absolute() else f' in {prefix.absolute().parent}'
        raise mistake(prefix, f'there is no {" and no ".join(missing)}{here}; {fix}')
    try:
        tokens = _map(bin_path, np.uint8)
        dtype, arrays = read_index(idx_path, len(tokens))
    except OSError as error:
        raise mistake(
            Path(error.filename or idx_path), f'cannot be read: {error.strerror}; make it readable'
        ) from error
    lengths, pointers, documents = arrays
    return Sequences(
        name=str(prefix),
        tokens=tokens.view(dtype),
        lengths=lengths,
        pointers=pointers,
        documents=documents,
    )


def read_index(path: Path, num_bytes: int) -> tuple[np.dtype, 'Arrays']:
    """Map PREFIX.idx of a PREFIX.bin of `num_bytes` bytes into memory, and check all of it.

    Returns the dtype of the tokens, and the lengths, pointers and document boundaries.
    """
    dtype, arrays = _parse(path, _map(path, np.uint8))
    _check_index(path, num_bytes, dtype.itemsize, *arrays)
    return dtype, arrays


def write_index(
    file: BinaryIO, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Write PREFIX.idx for these lengths, int32 [sequences], and document boundaries, int64."""
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
    file.write(lengths.astype('<i4', copy=False).data)
    for _, expected in _expected_pointers(lengths, dtype.itemsize):
        file.write(expected.astype('<i8', copy=False).data)
    file.write(documents.astype('<i8', copy=False).data)


def _map(path: Path, dtype: type) -> np.ndarray:
    # An empty file cannot be mapped. A plain array of a mapped file is sliced three times as fast.
    return (
        np.asarray(np.memmap(path, dtype, mode='r')) if path.stat().st_size else np.empty(0, dtype)
    )


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _parse(path: Path, index: np.ndarray) -> tuple[np.dtype, Arrays]:
    """Return the dtype of the tokens, and the lengths, pointers and document boundaries."""
    again = 'copy it again, or build it again'
    if len(index) < HEADER.size:
        raise mistake(
            path, f'has {len(index)} bytes, and the header alone has {HEADER.size}; {again}'
        )
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(
        index[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise mistake(
            path,
            f'at byte 0: {magic!r} instead of {MAGIC!r}, so this is not an index of tokens; '
            'give the prefix of a .bin and .idx',
        )
    if version != VERSION:
        raise mistake(
            path, f'at byte 9: version {version}, but only version {VERSION} is supported; {again}'
        )
    if code not in DTYPES or np.issubdtype(DTYPES[code], np.floating):
        integers = ', '.join(
            f'{known} ({dtype.__name__})'
            for known, dtype in DTYPES.items()
            if np.issubdtype(dtype, np.integer)
        )
        raise mistake(
            path, f'at byte 17: {code} is not a dtype of tokens; known are {integers}; {again}'
        )
    without_modes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(index) not in (without_modes, without_modes + num_sequences):
        counts = (
            f'{num_sequences} sequences and {num_boundaries} document boundaries (bytes 18 and 26)'
        )
        raise mistake(
            path,
            f'has {len(index)} bytes, and {counts} need {without_modes}, '
            f'or {num_sequences} more with modes; {again}',
        )
    lengths, pointers, documents, _ = np.split(
        index[HEADER.size :], np.cumsum([4 * num_sequences, 8 * num_sequences, 8 * num_boundaries])
    )
    return np.dtype(DTYPES[code]).newbyteorder('<'), (
        lengths.view('<i4'),
        pointers.view('<i8'),
        documents.view('<i8'),
    )


def _check_index(
    path: Path,
    num_bytes: int,
    itemsize: int,
    lengths: np.ndarray,
    pointers: np.ndarray,
    documents: np.ndarray,
) -> None:
    again = 'copy it again, or build it again'
    total = 0
    for first, expected in _expected_pointers(lengths, itemsize):
        some_lengths = lengths[first : first + CHUNK]
        some_pointers = pointers[first : first + CHUNK]
        if (bad := _first(some_lengths < 0)) is not None:
            where = f'at byte {HEADER.size + 4 * (first + bad)}: sequence {first + bad}'
            raise mistake(
                path,
                f'{where} has {some_lengths[bad]} tokens, fewer than 0; {again}',
            )
        if (bad := _first(some_pointers != expected)) is not None:
            byte = HEADER.size + 4 * len(lengths) + 8 * (first + bad)
            raise mistake(
                path,
                f'at byte {byte}: sequence {first + bad} begins at byte {some_pointers[bad]}, '
                f'and the lengths before it add up to {expected[bad]}; {again}',
            )
        total = int(expected[-1]) + itemsize * int(some_lengths[-1])
    if num_bytes != total:
        size = f'has {num_bytes} bytes, and the lengths in {path.name} add up to {total}'
        raise mistake(
            path.with_suffix('.bin'),
            f'{size}: {abs(total - num_bytes)} too {"few" if num_bytes < total else "many"}; '
            f'{again}',
        )
    _check_documents(path, documents, len(lengths), again)


def _check_documents(path: Path, documents: np.ndarray, num_sequences: int, again: str) -> None:
    begin = HEADER.size + 12 * num_sequences
    if not len(documents) or documents[0] != 0:
        raise mistake(
            path, f'at byte {begin}: the document boundaries do not begin with 0; {again}'
        )
    for first in range(0, len(documents), CHUNK):
        part = documents[first : first + CHUNK + 1]  # one more, to compare chunks with each other
        if (bad := _first(part[1:] < part[:-1])) is not None:
            where = f'at byte {begin + 8 * (first + bad + 1)}: document {first + bad + 1}'
            raise mistake(
                path,
                f'{where} begins with sequence {part[bad + 1]}, before document {first + bad}; '
                f'{again}',
            )
    if documents[-1] != num_sequences:
        where = f'at byte {begin + 8 * (len(documents) - 1)}'
        raise mistake(
            path,
            f'{where}: the documents end with sequence {documents[-1]}, '
            f'and there are {num_sequences}; {again}',
        )


def _expected_pointers(lengths: np.ndarray, itemsize: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each chunk's first sequence, and the bytes at which its sequences begin."""
    total = 0
    for first in range(0, len(lengths), CHUNK):
        ends = total + itemsize * np.cumsum(lengths[first : first + CHUNK], dtype=np.int64)
        yield first, np.concatenate([[total], ends[:-1]])
        total = int(ends[-1])


def _first(is_bad: np.ndarray) -> int | None:
    return int(is_bad.argmax()) if is_bad.any() else None
