"""Corpus files as streams of decompressed bytes."""

import bz2
import gzip
import io
import logging
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from megajax.runtime.data.sources.inputs import STDIN, Input, optional, unreadable
from megajax.runtime.data.sources.pieces import UNIT
from megajax.runtime.data.sources.remote import open_remote

# Number of compressed bytes that zstd gets at once. A block of 4 bytes may stand for 128 KiB of
# equal bytes, so a piece expands to at most 128 MiB, whatever the file contains.
PIECE = 1 << 12

logger = logging.getLogger(__name__)


@contextmanager
def open_input(input: Input, *, at_any_place: bool = False) -> Iterator[BinaryIO]:
    """Open the file, or standard input, which is not closed at the end.

    To seek in a file with a URL, set `at_any_place`, or give it a cache.
    """
    if input.path == STDIN:
        yield sys.stdin.buffer
    elif input.cached is not None:
        with input.cached() as file:
            yield file
    elif input.is_remote:
        with open_remote(input.path, input.size, at_any_place=at_any_place) as file:
            yield file
    else:
        if Path(input.path).is_fifo():
            logger.info('%s is a pipe: waiting for what writes into it', input.path)
        with Path(input.path).open('rb') as local:
            yield local


@contextmanager
def decompress(input: Input, raw: BinaryIO) -> Iterator[BinaryIO]:
    """Yield the decompressed stream of `raw`; raise EOFError if a compressed file is empty."""
    if not input.compression:
        yield raw
        return
    if not raw.peek(1):  # type: ignore[attr-defined]
        raise EOFError('the file is empty')
    if input.compression == '.zst':
        yield io.BufferedReader(_ZstdFile(raw), UNIT)
        return
    readers = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open}
    with readers[input.compression](raw) as file:  # type: ignore[operator]
        yield cast(BinaryIO, file)


def skip(stream: BinaryIO, count: int) -> None:
    """Read `count` bytes, or all up to the end, without keeping them."""
    while count and (skipped := len(stream.read(min(count, UNIT)))):
        count -= skipped


@contextmanager
def read_errors(input: Input) -> Iterator[None]:
    """Raise errors in reading the input as ConfigErrors that name the input."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise unreadable(input, error) from error


class _ZstdFile(io.RawIOBase):
    """A stream of decompressed zstd frames, which raises EOFError if the file ends inside a frame.

    zstandard's own stream reader ends there without an error.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._zstandard = optional('zstandard', STDIN)
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
        self._input = self._input or self._raw.read(PIECE)
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
