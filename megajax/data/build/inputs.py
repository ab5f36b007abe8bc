"""Corpus files as units of raw bytes, decompressed and cut at line ends; `parse.py` parses them."""

import glob
import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from megajax.config.errors import ConfigError, Problem

# bytes that a worker encodes at a time, in a fifth of a second and some 30 MB of tokenizers' memory
UNIT = 1 << 20
LONGEST = 1 << 28  # maximum bytes of a line, all of which is held in memory
STDIN = '-'

Format = Literal['jsonl', 'text', 'parquet']
SUFFIXES: dict[str, Format] = {
    '.jsonl': 'jsonl',
    '.json': 'jsonl',
    '.ndjson': 'jsonl',
    '.parquet': 'parquet',
}
COMPRESSED = ('.gz', '.zst')


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file of the corpus. A stream has size 0 and can be read only once."""

    path: str
    format: Format
    size: int  # bytes on disk
    mtime_ns: int
    stream: bool

    @property
    def compression(self) -> str:
        """The suffix of a compressed file, '.gz' or '.zst', else the empty string."""
        return Path(self.path).suffix if self.path.endswith(COMPRESSED) else ''


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position in the inputs from which reading resumes."""

    number: int = 0  # index of the input
    offset: int = 0  # byte of the decompressed input, or row of a Parquet file
    line: int = 1  # line of the input, counted from 1
    read: int = 0  # bytes on disk before this position, over all inputs


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an input: complete JSON lines, text of one document, or Parquet rows."""

    input: Input
    offset: int  # first byte of the decompressed input, or first row
    line: int  # first line, counted from 1
    data: bytes | list[bytes | None]
    first: bool = True  # whether a text document begins here
    last: bool = True  # whether a text document ends here

    @property
    def weight(self) -> int:
        """The size in bytes, plus a constant for the overhead of a piece."""
        return 100 + (
            len(self.data)
            if isinstance(self.data, bytes)
            else sum(len(row or b'') + 10 for row in self.data)
        )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Consecutive pieces, which one worker encodes together.

    Only the first piece may continue a document, and only the last may leave one open.
    """

    pieces: list[Piece] = field(default_factory=list)
    after: Position  # position after the last piece


def find_inputs(patterns: Sequence[str], format: Format | None) -> list[Input]:
    """Return the files that paths, globs and '-' name, in this order; matches of a glob are sorted.

    With `format` None, the suffix of each file decides. Raises ConfigError with every file that
    does not exist, cannot be read, or has a format that cannot be read in this way.
    """
    problems: list[Problem] = []
    inputs = []
    for pattern in patterns:
        try:
            inputs += [_look(path, format) for path in _expand(pattern)]
        except ConfigError as error:
            problems += [problem for problem in error.problems if isinstance(problem, Problem)]
    if not patterns:
        problems = [
            Problem(
                path='--input',
                message="names no file; give paths, globs, or '-' for standard input",
            )
        ]
    if problems:
        raise ConfigError(*problems)
    return inputs


def read_units(
    inputs: Sequence[Input], key: str, start: Position, unit: int = UNIT
) -> Iterator[Unit]:
    """Yield units of about `unit` bytes from `start` on; `key` is the column of a Parquet file.

    The cuts in a text document depend only on its bytes and `unit`. Raises ConfigError with file
    and place if an input cannot be read to its end.
    """
    pieces: list[Piece] = []
    weight = 0
    for piece, after in read_pieces(inputs, key, start, unit):
        pieces.append(piece)
        weight += piece.weight
        if weight >= unit // 2 or not piece.last:
            yield Unit(pieces=pieces, after=after)
            pieces, weight = [], 0
    if pieces:
        yield Unit(pieces=pieces, after=after)


def read_pieces(
    inputs: Sequence[Input], key: str, start: Position, unit: int = UNIT
) -> Iterator[tuple[Piece, Position]]:
    """Yield pieces of at most `unit` bytes, or one longer line, each with the position after it."""
    before = sum(input.size for input in inputs[: start.number])
    for number in range(start.number, len(inputs)):
        input = inputs[number]
        here = start if number == start.number else Position(number=number)
        for piece, ended, read in (
            _rows(input, key, here, unit) if input.format == 'parquet' else _text(input, here, unit)
        ):
            lines = piece.data.count(b'\n') if isinstance(piece.data, bytes) else len(piece.data)
            after = Position(
                number=number,
                offset=piece.offset + len(piece.data),
                line=piece.line + lines,
                read=before + read,
            )
            yield (
                piece,
                Position(number=number + 1, read=before + (input.size or read)) if ended else after,
            )
        before += input.size


def _expand(pattern: str) -> list[str]:
    path = str(Path(pattern).expanduser())
    if pattern == STDIN or Path(path).exists():
        return [path]
    if not glob.has_magic(path):
        raise _problem(path, 'there is no such file; check the name, or give a glob in quotes')
    names = sorted(name for name in glob.glob(path, recursive=True) if not Path(name).is_dir())
    if not names:
        raise _problem(path, "matches no file; check the pattern ('**' descends into folders)")
    return names


def _look(path: str, format: Format | None) -> Input:
    if path == STDIN:
        input = Input(path=path, format=format or 'jsonl', size=0, mtime_ns=0, stream=True)
    else:
        bare = Path(path).with_suffix('') if path.endswith(COMPRESSED) else Path(path)
        try:
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                Path(path).open('rb').close()
        except OSError as error:
            raise _problem(
                path, f'cannot be read: {error.strerror}; make it readable, or leave it out'
            ) from error
        if stat.S_ISDIR(status.st_mode):
            raise _problem(
                path, f"is a folder; give its files, for example '{path.rstrip('/')}/*.jsonl'"
            )
        stream = not stat.S_ISREG(status.st_mode)
        size, mtime_ns = (0, 0) if stream else (status.st_size, status.st_mtime_ns)
        input = Input(
            path=path,
            format=format or SUFFIXES.get(bare.suffix, 'text'),
            size=size,
            mtime_ns=mtime_ns,
            stream=stream,
        )
    if input.format == 'parquet' and (input.stream or input.compression):
        raise _problem(
            path,
            'Parquet is read only from uncompressed files, not streams; write it to such a file',
        )
    if input.compression == '.zst':
        _optional('zstandard', path)
    elif input.format == 'parquet':
        _optional('pyarrow', path)
    return input


def _text(input: Input, here: Position, unit: int) -> Iterator[tuple[Piece, bool, int]]:
    """Yield pieces of JSON lines or of a text document.

    With each piece come whether it is the last of the file, and the bytes of the file read so far.
    """
    offset, line = here.offset, here.line
    with _errors(input), _open(input) as raw, _decompress(input, raw) as stream:
        if input.compression:
            _skip(stream, offset)
        elif offset:
            stream.seek(offset)
        for data, ended in _blocks(input, stream, unit):
            is_jsonl = input.format == 'jsonl'
            piece = Piece(
                input=input,
                offset=offset,
                line=line,
                data=data,
                first=is_jsonl or not offset,
                last=is_jsonl or ended,
            )
            yield piece, ended, offset + len(data) if input.stream else raw.tell()
            offset, line = offset + len(data), line + data.count(b'\n')


def _blocks(input: Input, stream: BinaryIO, unit: int) -> Iterator[tuple[bytes, bool]]:
    """Yield blocks of complete lines, each with whether it is the last.

    A block has at most `unit` bytes, unless a single line is longer.
    """
    block = bytearray()
    while True:
        block += stream.read(unit + 1 - len(block))  # one byte more, to notice the end
        end = _cut(block, unit, input.format) if len(block) > unit else 0
        seen = unit
        while not end and len(block) > seen:
            end = block.find(b'\n', seen) + 1
            if not end:
                seen = len(block)
                block += stream.read(unit)
                if len(block) > LONGEST:
                    raise _problem(
                        input.path,
                        f'has a line of more than {LONGEST >> 20} MiB; '
                        f'split the line (is the file {input.format}?)',
                    )
        yield bytes(block[: end or len(block)]), not end
        if not end:
            return
        del block[:end]


def _cut(block: bytearray, unit: int, format: Format) -> int:
    """Return the index after the last line break before `unit`, 0 if there is none.

    In text, prefer a break at which the usual tokenizers split too, so that no token changes: one
    between two lines that are neither blank nor indented, or else one before such a line.
    """
    if format == 'text':
        for lines in (rb'\S\n(?=\S)', rb'\n(?=\S)'):
            ends = [match.end() for match in re.finditer(lines, block[unit // 2 : unit + 1])]
            if ends:
                return unit // 2 + ends[-1]
    return block.rfind(b'\n', 0, unit) + 1


def _rows(input: Input, key: str, here: Position, unit: int) -> Iterator[tuple[Piece, bool, int]]:
    """Yield pieces of rows of a Parquet file.

    With each piece come whether it is the last of the file, and the bytes of the file read so far,
    estimated from the number of rows.
    """
    parquet, arrow = _optional('pyarrow.parquet', input.path), _optional('pyarrow', input.path)
    try:
        with parquet.ParquetFile(input.path, pre_buffer=False, buffer_size=UNIT) as file:
            _check_column(input, key, file.schema_arrow)
            total, row = file.metadata.num_rows, here.offset
            rows: list[bytes | None] = []
            weight = 0
            for text in _column(file, key, row):
                rows.append(text)
                weight += len(text or b'') + 10
                if weight >= unit or row + len(rows) == total:
                    piece = Piece(input=input, offset=row, line=row + 1, data=rows)
                    row, rows, weight = row + len(rows), [], 0
                    yield piece, row == total, input.size * row // total
    except (arrow.ArrowException, OSError) as error:
        raise _unreadable(input, error) from error


def _column(file: Any, key: str, start: int) -> Iterator[bytes | None]:
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if start < first + rows:
            for batch in file.iter_batches(
                batch_size=256, row_groups=[group], columns=[key], use_threads=False
            ):
                # as bytes, because the worker reports which row is not UTF-8
                texts = batch.column(0).cast('large_string').cast('large_binary').to_pylist()
                yield from texts[max(start - first, 0) :]
                first += len(texts)
        else:
            first += rows


def _check_column(input: Input, key: str, schema: Any) -> None:
    if key not in schema.names:
        raise _problem(
            input.path, f'has no column {key!r}; give --json-key one of {", ".join(schema.names)}'
        )
    kind = schema.field(key).type
    if str(getattr(kind, 'value_type', kind)) not in ('string', 'large_string', 'string_view'):
        raise _problem(
            input.path, f'column {key!r} is {kind}, not text; give --json-key a column of strings'
        )


@contextmanager
def _open(input: Input) -> Iterator[BinaryIO]:
    if input.path == STDIN:
        yield sys.stdin.buffer
    else:
        with Path(input.path).open('rb') as file:
            yield file


@contextmanager
def _decompress(input: Input, raw: BinaryIO) -> Iterator[BinaryIO]:
    if not input.compression:
        yield raw
        return
    if not raw.peek(1):  # type: ignore[attr-defined]
        raise EOFError('the file is empty')
    if input.compression == '.gz':
        with gzip.GzipFile(fileobj=raw) as file:
            yield cast(BinaryIO, file)
    else:
        yield io.BufferedReader(_ZstdFile(raw), UNIT)


class _ZstdFile(io.RawIOBase):
    """A stream of decompressed zstd frames, which raises EOFError if the file ends inside a frame.

    zstandard's own stream reader ends there without an error.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._zstandard = _optional('zstandard', STDIN)
        self._raw = raw
        self._frame: Any = None
        self._input, self._output = b'', memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output and self._fill():
            pass
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _fill(self) -> bool:
        self._input = self._input or self._raw.read(1 << 16)
        if not self._input:
            if self._frame:
                raise EOFError('the file ends inside a frame')
            return False
        try:
            # `zstd --long=31` needs a window of 2 GB
            self._frame = (
                self._frame
                or self._zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            )
            self._output = memoryview(self._frame.decompress(self._input))
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._input = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return True


def _skip(stream: BinaryIO, count: int) -> None:
    while count and (skipped := len(stream.read(min(count, UNIT)))):
        count -= skipped


@contextmanager
def _errors(input: Input) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(input, error) from error


def _unreadable(input: Input, error: Exception) -> ConfigError:
    reason = getattr(error, 'strerror', None) or str(error).splitlines()[0].rstrip('. ')
    return _problem(
        input.path, f'cannot be read to its end: {reason}; copy it again, or leave it out'
    )


def _optional(module: str, path: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise _problem(
            path, f"needs {error.name}, which is not installed; pip install 'megajax[data]'"
        ) from error


def _problem(path: str, message: str) -> ConfigError:
    return ConfigError(Problem(path=path, message=message))
