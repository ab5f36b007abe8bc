"""Read corpus files as units of decompressed bytes, cut at line ends; `parse.py` parses them."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from megajax.base.errors import ConfigError, Problem, mistake
from megajax.runtime.data.sources.contents import check_contents
from megajax.runtime.data.sources.decompress import decompress, open_input, read_errors, skip
from megajax.runtime.data.sources.inputs import Format, Input
from megajax.runtime.data.sources.parquet import read_rows
from megajax.runtime.data.sources.parse import Fixes
from megajax.runtime.data.sources.pieces import UNIT, InputPiece, Position, Unit
from megajax.runtime.data.text.long_texts import AROUND

HEAD = 1 << 16  # number of bytes of each file that are read before a build begins
MAX_LINE_BYTES = 1 << 28  # maximum bytes of a line, all of which is held in memory


def check_inputs(inputs: Sequence[Input], key: str) -> None:
    """Raise ConfigError with every local file whose content contradicts its name.

    A stream or remote file is checked when it is read.
    """
    problems: list[Problem | str] = []
    for input in inputs:
        if not input.stream and not input.is_remote:
            try:
                next(read_pieces([input], key, Position(), HEAD), None)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(*problems)


def read_units(
    inputs: Sequence[Input], key: str, start: Position, unit: int = UNIT
) -> Iterator[Unit]:
    """Yield units of about `unit` bytes from `start` on; `key` is the column of a Parquet file.

    The cuts in a text document depend only on its bytes and `unit`. Raises ConfigError with file
    and place if an input cannot be read to its end.
    """
    pieces: list[InputPiece] = []
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
    inputs: Sequence[Input],
    key: str,
    start: Position,
    unit: int = UNIT,
    fixes: Fixes | None = None,
) -> Iterator[tuple[InputPiece, Position]]:
    """Yield pieces of at most `unit` bytes, or one longer line, each with the position after it.

    `fixes` is the advice about a Parquet file without texts.
    """
    before = sum(input.size for input in inputs[: start.number])
    for number in range(start.number, len(inputs)):
        input = inputs[number]
        here = start if number == start.number else Position(number=number)
        for piece, ended, read in (
            read_rows(input, key, here, unit, fixes)
            if input.format == 'parquet'
            else _text(input, key, here, unit)
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


def _text(
    input: Input, key: str, here: Position, unit: int
) -> Iterator[tuple[InputPiece, bool, int]]:
    """Yield pieces of JSON lines or of a text document.

    Each piece comes with whether it is the last of the file, and with the bytes of the file read so
    far.
    """
    offset, line = here.offset, here.line
    is_jsonl = input.format == 'jsonl'
    with read_errors(input), open_input(input) as raw, decompress(input, raw) as stream:
        context = max(offset - AROUND, 0)
        if offset and not input.compression and stream.seekable():
            stream.seek(context)
        else:
            skip(stream, context)
        before = stream.read(offset - context)
        if not context:
            before = before.removeprefix(BOM_UTF8)
        for data, after, ended in _blocks(input, stream, unit):
            if not offset:
                check_contents(input, data, whole=ended, key=key)
            piece = InputPiece(
                input=input,
                offset=offset,
                line=line,
                data=data,
                first=is_jsonl or not offset,
                last=is_jsonl or ended,
                before=b'' if is_jsonl else before,
                after=b'' if is_jsonl else after,
            )
            before = (before + (data if offset else data.removeprefix(BOM_UTF8)))[-AROUND:]
            yield piece, ended, offset + len(data) if input.stream else raw.tell()
            offset, line = offset + len(data), line + data.count(b'\n')


def _blocks(input: Input, stream: BinaryIO, unit: int) -> Iterator[tuple[bytes, bytes, bool]]:
    """Yield blocks of complete lines, each with the bytes after it and whether it is the last.

    A block has at most `unit` bytes, unless a single line is longer.
    """
    block = bytearray()
    while True:
        block += stream.read(max(unit + 1 - len(block), 0))  # one byte more, to notice the end
        end = _cut(block, unit, input.format) if len(block) > unit else 0
        seen = unit
        while not end and len(block) > seen:
            end = block.find(b'\n', seen) + 1
            if not end:
                seen = len(block)
                block += stream.read(unit)
                if len(block) > MAX_LINE_BYTES:
                    raise line_error(input)
        if not end:
            yield bytes(block), b'', True
            return
        block += stream.read(max(end + AROUND - len(block), 0))
        yield bytes(block[:end]), bytes(block[end : end + AROUND]), False
        del block[:end]


def line_error(input: Input) -> ConfigError:
    """Return the ConfigError for a line of more than `MAX_LINE_BYTES`."""
    return mistake(
        input.path,
        f'has a line of more than {MAX_LINE_BYTES >> 20} MiB; '
        f'split the line (is the file {input.format}?)',
    )


def _cut(block: bytearray, unit: int, format: Format) -> int:
    """Return the index after the last line break before `unit`, 0 if there is none.

    In text, prefer a break at which the usual tokenizers split too: one between two lines that are
    neither blank nor indented, or else one before such a line.
    """
    if format == 'text':
        for lines in (rb'\S\n(?=\S)', rb'\n(?=\S)'):
            ends = [match.end() for match in re.finditer(lines, block[unit // 2 : unit + 1])]
            if ends:
                return unit // 2 + ends[-1]
    return block.rfind(b'\n', 0, unit) + 1
