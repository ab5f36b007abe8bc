"""Divide the files of a corpus into shares, each of which is read without the others.

A share is a range of lines of a file, a range of rows of a Parquet file, or every nth block of a
compressed file, which has to be read from its beginning. Names, sizes and row groups of the files
decide the shares.
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import BinaryIO

import numpy as np

from megajax.base.errors import ConfigError, mistake
from megajax.runtime.data.sources.contents import NoTextError, check_contents
from megajax.runtime.data.sources.decompress import decompress, open_input, read_errors
from megajax.runtime.data.sources.inputs import Input
from megajax.runtime.data.sources.parquet import group_sizes
from megajax.runtime.data.sources.parse import Fixes, parse
from megajax.runtime.data.sources.pieces import UNIT, InputPiece, Position
from megajax.runtime.data.sources.read import HEAD, MAX_LINE_BYTES, line_error, read_pieces
from megajax.runtime.data.sources.remote_file import FETCHES

KEY = 'text'  # the key of a line's text
# The number of shares of a corpus: about `USUAL`, unless they would be too small or too large.
USUAL, SMALLEST, LARGEST = 1 << 12, 1 << 14, UNIT
EXPANDED = 8  # bytes of text that a compressed byte may stand for
# Maximum number of shares of a file, or of a row group, that is read from its beginning for each.
MOST = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class _File:
    name: str
    input: Input
    # The first byte, row or number of each share, and the end of the last one.
    bounds: Sequence[int]


class Shares:
    """The shares of the files of a corpus, by number, in the order of the files' names.

    `fixes` is the advice about lines that cannot be used. Raises ConfigError if a Parquet file
    cannot be read.
    """

    def __init__(self, inputs: Mapping[str, Input], fixes: Fixes) -> None:
        self._fixes = fixes
        self._files = [
            _File(name=name, input=inputs[name], bounds=bounds)
            for name, bounds in sorted(_bounds(inputs, fixes).items())
        ]
        counts = (len(file.bounds) - 1 for file in self._files)
        self._starts = list(accumulate(counts, initial=0))
        self._is_text = cache(partial(_is_text, alone=len(self._files) == 1))

    def __len__(self) -> int:
        return self._starts[-1]

    def name(self, number: int) -> str:
        """Return the name of a share, which does not depend on the location of the corpus."""
        file, share = self._find(number)
        return f'{file.name}:{share}'

    def place(self, number: int) -> str:
        """Return the file of a share and its part of it, for an error."""
        file, share = self._find(number)
        if file.input.compression:
            return f'{file.input.path}: share {share + 1} of {len(file.bounds) - 1}'
        unit = 'rows' if file.input.format == 'parquet' else 'bytes'
        first, stop = file.bounds[share], file.bounds[share + 1]
        return f'{file.input.path}: {unit} {first} to {stop}'

    def texts(self, number: int) -> Iterator[str]:
        """Yield the texts of a share in the order of the file.

        A text file is cut at line ends, or between words of long lines, and its shares are separate
        texts. In a folder, files that are not text are left out. Raises ConfigError with file and
        line, or byte, and if the size of a file has changed.
        """
        file, share = self._find(number)
        _check_size(file.input)
        for piece in self._pieces(file, share):
            for text in parse(piece, KEY, self._fixes):
                if not isinstance(text, str):
                    raise ConfigError(text)
                yield text

    def _pieces(self, file: _File, share: int) -> Iterable[InputPiece]:
        first, stop = file.bounds[share], file.bounds[share + 1]
        if file.input.format == 'parquet':
            # All at once: an open reader holds its whole row group, twice.
            return [*_rows(file.input, first, stop)]
        if not self._is_text(file):
            return ()
        if file.input.compression:
            return _every(file.input, first, len(file.bounds) - 1)
        return _lines(file.input, first, stop)

    def _find(self, number: int) -> tuple[_File, int]:
        index = bisect_right(self._starts, number) - 1
        return self._files[index], number - self._starts[index]


def _bounds(inputs: Mapping[str, Input], fixes: Fixes) -> dict[str, Sequence[int]]:
    """Return the bounds of the shares of each file that is not empty."""
    full = {name: input for name, input in inputs.items() if input.size}
    packed = [name for name, input in full.items() if input.compression]
    tables = {name: input for name, input in full.items() if input.format == 'parquet'}
    plain = full.keys() - packed - tables.keys()
    unit = _bounded(sum(full[name].size for name in plain) // USUAL)
    with ThreadPoolExecutor(FETCHES) as threads:
        found = threads.map(lambda table: group_sizes(table, KEY, fixes), tables.values())
        sizes = dict(zip(tables, found, strict=True))
    groups = sum(map(len, sizes.values()))
    of_name: dict[str, Sequence[int]] = {}
    for name, input in full.items():
        if name in plain:
            of_name[name] = [*range(0, input.size, unit), input.size]
        elif name in tables:
            of_name[name] = _row_bounds(sizes[name], _parts(groups))
        else:
            parts = min(_parts(len(packed)), -(-EXPANDED * input.size // SMALLEST))
            of_name[name] = range(parts + 1)
    return of_name


def _bounded(unit: int) -> int:
    return min(max(unit, SMALLEST), LARGEST)


def _parts(count: int) -> int:
    """Return the number of shares of each of `count` files or row groups."""
    return min(-(-USUAL // max(count, 1)), MOST)


def _row_bounds(group_sizes: Sequence[int], parts: int) -> list[int]:
    bounds = [0]
    for first, stop in pairwise(accumulate(group_sizes, initial=0)):
        steps = np.linspace(first, stop, min(parts, stop - first) + 1).round()
        bounds += steps[1:].astype(int).tolist()
    return bounds


def _is_text(file: _File, *, alone: bool) -> bool:
    """Whether a file is text; raise ConfigError if its content contradicts its name otherwise."""
    input = file.input
    with read_errors(input), open_input(input) as raw, decompress(input, raw) as source:
        head = source.read(HEAD)
    whole = len(head) < HEAD
    lines = head if whole else head[: head.rfind(b'\n') + 1] or head
    try:
        check_contents(input, lines, whole=whole)
    except NoTextError:
        if alone:
            raise
        logger.warning('data.corpus: not reading %s, which is not text', input.path)
        return False
    return True


def _check_size(input: Input) -> None:
    """Raise ConfigError if a file on the disk no longer has the size that decided its shares."""
    if input.is_remote:
        return
    with read_errors(input):
        size = os.stat(input.path).st_size
    if size != input.size:
        raise mistake(
            input.path,
            f'has changed since the run began, from {input.size} bytes to {size}; restore it, and '
            'start the run again to resume from its last checkpoint',
        )


def _lines(input: Input, start: int, stop: int) -> Iterator[InputPiece]:
    """Yield the lines that begin at byte `start` or later, but before `stop`."""
    begin = _line_after if input.format == 'jsonl' else _text_after
    with read_errors(input), open_input(input) as file:
        first, last = begin(input, file, start), begin(input, file, stop)
        if first == last:
            return
        file.seek(first)
        data = file.read(last - first)
    yield InputPiece(input=input, offset=first, line=0 if first else 1, data=data)


def _line_after(input: Input, file: BinaryIO, start: int) -> int:
    """Return the first byte at or after `start` with which a line begins."""
    if start == 0:
        return 0
    file.seek(start - 1)
    while part := file.readline(UNIT):
        if part.endswith(b'\n'):
            break
        if file.tell() - start > MAX_LINE_BYTES:
            raise line_error(input)
    return file.tell()


def _text_after(_: Input, file: BinaryIO, start: int) -> int:
    """Return the byte at or after `start` at which a text is cut.

    A line or the next word begins there; without one in the next 64 KiB, a character does.
    """
    if start == 0:
        return 0
    file.seek(start - 1)
    data = file.read(HEAD)
    if cut := data.find(b'\n') + 1:
        return start - 1 + cut
    if len(data) < HEAD:
        return start - 1 + len(data)
    if cut := data.find(b' ') + 1:
        return start - 1 + cut
    # all bytes of a UTF-8 character after its first one are 0b10......
    return start + next((i for i in range(4) if data[1 + i] & 0xC0 != 0x80), 0)


def _rows(input: Input, start: int, stop: int) -> Iterator[InputPiece]:
    for piece, _ in read_pieces([input], KEY, Position(offset=start, line=start + 1)):
        count = stop - piece.offset
        yield replace(piece, data=piece.data[:count])
        if count <= len(piece.data):
            return


def _every(input: Input, number: int, count: int) -> Iterator[InputPiece]:
    """Yield blocks `number`, `number` + `count` and so on of a compressed file."""
    # blocks that are small enough for every share to have some
    unit = _bounded(input.size // (4 * count))
    for index, (piece, _) in enumerate(read_pieces([input], KEY, Position(), unit)):
        if index % count == number:
            yield piece
