"""Pieces of raw corpus bytes, which the reader passes to the workers."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megajax.runtime.data.sources.inputs import Input

# bytes that a worker encodes at a time; this takes a fifth of a second, and some 30 MB of memory in
# tokenizers
UNIT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position in the inputs from which reading resumes."""

    number: int = 0  # index of the input
    offset: int = 0  # byte offset in the decompressed input, or row of a Parquet file
    line: int = 1  # line of the input, counted from 1
    read: int = 0  # number of bytes on disk before this position, over all inputs


@dataclass(frozen=True, kw_only=True)
class InputPiece:
    """A piece of an input: complete JSON lines, text of one document, or Parquet rows."""

    input: Input
    offset: int  # first byte of the decompressed input, or first row
    line: int  # first line, counted from 1; 0 if unknown
    data: bytes | list[bytes | None]
    first: bool = True  # whether a text document begins here
    last: bool = True  # whether a text document ends here
    # end of the part of the text document before this piece, as context for its tokens
    before: bytes = b''
    after: bytes = b''  # beginning of the part of the text document after this piece
    images: Mapping[int, int] = field(default_factory=dict)  # number of images of rows with images

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

    pieces: list[InputPiece] = field(default_factory=list)
    after: Position  # position after the last piece
