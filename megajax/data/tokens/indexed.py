"""Megatron's token files: PREFIX.bin holds the ids of all sequences in a row, PREFIX.idx says where each begins.

PREFIX.idx, little-endian, is a header (magic, version, dtype code, number of sequences S, number of document boundaries D) and then
lengths int32 [S] | pointers int64 [S], in bytes | document boundaries int64 [D], as sequence numbers | perhaps modes int8 [S],
as megatron-core's `indexed_dataset.py` writes it. A document has any number of sequences, mostly one.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megajax.config.errors import ConfigError, Problem

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

CHUNK = 1 << 20  # entries that a check holds in memory at a time


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Token ids of sequences in a row, in memory or mapped from files; `name` is what errors call them.

    `tokens` [T]; `lengths` int32 [S]; `pointers` int64 [S], the byte of `tokens` where a sequence begins; `documents` int64 [D], the
    sequence with which each document begins, and S at the end. `read` goes through `reader` where there is one.
    """

    name: str
    tokens: np.ndarray
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    reader: Callable[[int, int], np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Token ids `start` to `stop`, or to the end, for a batch."""
        stop = min(stop, len(self.tokens))
        return self.tokens[start:stop] if self.reader is None else self.reader(start, stop)

    def start(self, sequence: int) -> int:
        """The first token of a sequence; of sequence S, the number of tokens."""
        return (
            int(self.pointers[sequence]) // self.tokens.itemsize
            if sequence < len(self)
            else len(self.tokens)
        )

    def document_starts(self, start: int, stop: int) -> list[int]:
        """The tokens after `start` and before `stop` with which a document begins."""
        # bisect, because numpy would copy the mapped arrays, which are not aligned
        first, last = (
            bisect_right(self.pointers, token * self.tokens.itemsize) for token in (start, stop - 1)
        )
        documents = self.documents[
            bisect_right(self.documents, first - 1) : bisect_right(self.documents, last - 1)
        ]
        return sorted({self.start(int(sequence)) for sequence in documents} - {start})

    def sequence_starts(self, start: int, stop: int) -> list[int]:
        """The tokens after `start` and before `stop` with which a sequence begins."""
        first, last = (
            bisect_right(self.pointers, token * self.tokens.itemsize) for token in (start, stop - 1)
        )
        return sorted({self.start(sequence) for sequence in range(first, last)} - {start})

    def fingerprint(self) -> str:
        """A hash of the sizes, and of the first and last million of tokens and lengths: another for other data, soon made for any size."""
        digest = sha256(
            f'{self.tokens.dtype.name} {len(self.tokens)} {len(self)} {len(self.documents)}'.encode()
        )
        for array in (self.tokens, self.lengths):
            digest.update(array[:CHUNK].tobytes())
            digest.update(array[-CHUNK:].tobytes())
        return digest.hexdigest()


def from_lengths(name: str, tokens: np.ndarray, lengths: np.ndarray) -> Sequences:
    """Tokens in memory as sequences of these lengths, a document each."""
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
    """Whether PREFIX names token files; one of the two is enough, so that the other can be missed."""
    return any(path.exists() for path in paths(Path(prefix).expanduser()))


def paths(prefix: str | Path) -> tuple[Path, Path]:
    """PREFIX.bin and PREFIX.idx."""
    return Path(f'{prefix}.bin'), Path(f'{prefix}.idx')


def read_pair(prefix: str | Path) -> Sequences:
    """Map a pair of files and check all that its index says; raises ConfigError, which names file, byte and fix."""
    prefix = Path(prefix).expanduser()
    bin_path, idx_path = paths(prefix)
    if missing := [path.name for path in (bin_path, idx_path) if not path.is_file()]:
        raise _problem(
            prefix,
            f'there is no {" and no ".join(missing)}; give the prefix of two files, copied or built with megajax data build',
        )
    try:
        tokens, index = _map(bin_path, np.uint8), _map(idx_path, np.uint8)
    except OSError as error:
        raise _problem(
            Path(error.filename or idx_path), f'cannot be read: {error.strerror}; allow it'
        ) from error
    dtype, arrays = _parse(idx_path, index)
    _check_index(idx_path, len(tokens), dtype.itemsize, *arrays)
    lengths, pointers, documents = arrays
    return Sequences(
        name=str(prefix),
        tokens=tokens.view(dtype),
        lengths=lengths,
        pointers=pointers,
        documents=documents,
    )


def write_index(
    file: BinaryIO, dtype: np.dtype, lengths: np.ndarray, documents: np.ndarray
) -> None:
    """Write PREFIX.idx for sequences of these lengths, int32 [S], and these document boundaries, int64 [D]."""
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), len(documents)))
    file.write(lengths.astype('<i4', copy=False).data)
    for _, expected in _expected_pointers(lengths, dtype.itemsize):
        file.write(expected.astype('<i8', copy=False).data)
    file.write(documents.astype('<i8', copy=False).data)


def _map(path: Path, dtype: type) -> np.ndarray:
    # an empty file cannot be mapped; as a plain array, a mapped one is sliced three times as fast
    return (
        np.asarray(np.memmap(path, dtype, mode='r')) if path.stat().st_size else np.empty(0, dtype)
    )


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _parse(path: Path, index: np.ndarray) -> tuple[np.dtype, Arrays]:
    """The dtype of the tokens, and lengths, pointers and document boundaries."""
    again = 'copy it again, or build it again'
    if len(index) < HEADER.size:
        raise _problem(
            path, f'has {len(index)} bytes, and the header alone has {HEADER.size}; {again}'
        )
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(
        index[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise _problem(
            path,
            f'at byte 0: {magic!r} instead of {MAGIC!r}: no index of tokens; give the prefix of a .bin and .idx',
        )
    if version != VERSION:
        raise _problem(
            path, f'at byte 9: version {version}, and there is only version {VERSION}; {again}'
        )
    if code not in DTYPES or np.issubdtype(DTYPES[code], np.floating):
        integers = ', '.join(
            f'{known} ({dtype.__name__})'
            for known, dtype in DTYPES.items()
            if np.issubdtype(dtype, np.integer)
        )
        raise _problem(
            path, f'at byte 17: {code} is no dtype of tokens; there are {integers}; {again}'
        )
    without_modes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if len(index) not in (without_modes, without_modes + num_sequences):
        counts = (
            f'{num_sequences} sequences and {num_boundaries} document boundaries (bytes 18 and 26)'
        )
        raise _problem(
            path,
            f'has {len(index)} bytes, and {counts} need {without_modes}, or {num_sequences} more with modes; {again}',
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
        part, found = lengths[first : first + CHUNK], pointers[first : first + CHUNK]
        if (wrong := _first(part < 0)) is not None:
            where = f'at byte {HEADER.size + 4 * (first + wrong)}: sequence {first + wrong}'
            raise _problem(
                path, f'{where} has {part[wrong]} tokens, and cannot have fewer than 0; {again}'
            )
        if (wrong := _first(found != expected)) is not None:
            where = f'at byte {HEADER.size + 4 * len(lengths) + 8 * (first + wrong)}: sequence {first + wrong}'
            raise _problem(
                path,
                f'{where} begins at byte {found[wrong]}, and the lengths before it add up to {expected[wrong]}; {again}',
            )
        total = int(expected[-1]) + itemsize * int(part[-1])
    if num_bytes != total:
        size = f'has {num_bytes} bytes, and the lengths in {path.name} add up to {total}'
        raise _problem(
            path.with_suffix('.bin'),
            f'{size}: {abs(total - num_bytes)} too {"few" if num_bytes < total else "many"}; {again}',
        )
    _check_documents(path, documents, len(lengths), again)


def _check_documents(path: Path, documents: np.ndarray, num_sequences: int, again: str) -> None:
    begin = HEADER.size + 12 * num_sequences
    if not len(documents) or documents[0] != 0:
        raise _problem(
            path, f'at byte {begin}: the document boundaries do not begin with 0; {again}'
        )
    for first in range(0, len(documents), CHUNK):
        part = documents[first : first + CHUNK + 1]  # one more, to compare with the next
        if (wrong := _first(part[1:] < part[:-1])) is not None:
            where = f'at byte {begin + 8 * (first + wrong + 1)}: document {first + wrong + 1}'
            raise _problem(
                path,
                f'{where} begins with sequence {part[wrong + 1]}, before document {first + wrong}; {again}',
            )
    if documents[-1] != num_sequences:
        where = f'at byte {begin + 8 * (len(documents) - 1)}'
        raise _problem(
            path,
            f'{where}: the documents end with sequence {documents[-1]}, and there are {num_sequences}; {again}',
        )


def _expected_pointers(lengths: np.ndarray, itemsize: int) -> Iterator[tuple[int, np.ndarray]]:
    """A chunk's first sequence and the bytes where its sequences begin."""
    total = 0
    for first in range(0, len(lengths), CHUNK):
        ends = total + itemsize * np.cumsum(lengths[first : first + CHUNK], dtype=np.int64)
        yield first, np.concatenate([[total], ends[:-1]])
        total = int(ends[-1])


def _first(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None


def _problem(path: Path, message: str) -> ConfigError:
    return ConfigError(Problem(path=str(path), message=message))
