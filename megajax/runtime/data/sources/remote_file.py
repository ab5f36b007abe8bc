"""Parts of a remote file, through a cache on the local disk.

Transient errors are retried, and a file that changes while a run reads it ends the run.
"""

import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar, cast

from megajax.base.errors import UnreachableError, mistake
from megajax.runtime.data.sources.block_cache import BLOCK, BlockCache
from megajax.runtime.data.sources.remote import Looked, UnansweredError, fetch, look

LOOK_EVERY = 10.0  # seconds between checks of a file's version while parts of it are fetched
# Number of threads that read remote files; most of the time, a thread waits for the server.
FETCHES = 16
BLOCKS_AT_ONCE = 32  # number of blocks that one request fetches
PIECE = BLOCK * BLOCKS_AT_ONCE  # bytes
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts, doubled each time
# Seconds after which there are no more attempts: at the start of a run, when the user is watching,
# and during the run, in which a step may take ten minutes (`watchdog_limits.py`).
AT_START, IN_RUN = 20.0, 240.0

Found = TypeVar('Found')

logger = logging.getLogger(__name__)


def patiently(url: str, question: Callable[[], Found], *, in_run: bool = False) -> Found:
    """Return the answer to a question about a remote file, asked again after transient errors.

    Errors that the user must correct are raised at once. If there is still no answer after a while,
    raises UnreachableError during a run, and the ConfigError of the last attempt at its start.
    """
    seconds = IN_RUN if in_run else AT_START
    end, wait = time.monotonic() + seconds, FIRST_WAIT
    while True:
        try:
            return question()
        except (OSError, UnansweredError) as error:
            if time.monotonic() + wait > end:
                if isinstance(error, UnansweredError) and not in_run:
                    raise
                message = f'{url}: cannot be read after {seconds:.0f} s of attempts: {error}'
                raise UnreachableError(f'{message}; check the network, and start again') from error
            logger.warning('%s: %s; trying again in %.1f s', url, error, wait)
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)


class RemoteFile:
    """A file by its URL, at the version that it has when it is opened; `looked` is a known one.

    Raises MissingError if there is no such file, and ConfigError if the server gives no size or no
    version.
    """

    def __init__(self, url: str, cache: BlockCache, looked: Looked | None = None) -> None:
        self.url, self._cache = url, cache
        size, self.version = looked or patiently(url, lambda: look(url))
        if size is None:
            message = 'is on a server that gives no size; copy it to another one'
            raise mistake(url, message)
        if not self.version:
            message = (
                'is on a server that gives neither an ETag nor a time of the last change, so a '
                'change would not be noticed; copy it to another one'
            )
            raise mistake(url, message)
        self.size = size
        # The hash of a value that changes with the content: the ETag, or the time of the last
        # change.
        self.fingerprint = sha256(f'{size} {self.version}'.encode()).hexdigest()
        self.key = sha256(f'{url} {self.fingerprint}'.encode()).hexdigest()[:32]
        self._lock = Lock()
        self._next_look = time.monotonic() + LOOK_EVERY
        self._unsure: list[int] = []  # blocks that were fetched after the last check of the version

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start` up to `stop`, which must not exceed the size of the file."""
        numbers = range(start // BLOCK, -(-stop // BLOCK))
        bounds = {n: (max(start - n * BLOCK, 0), min(stop - n * BLOCK, BLOCK)) for n in numbers}
        parts = {number: self._cache.read(self.key, number, *bounds[number]) for number in numbers}
        for run in _runs([number for number in numbers if parts[number] is None]):
            parts |= {n: block[slice(*bounds[n])] for n, block in self._fetch(run).items()}
        self._look_again()
        return b''.join(part for part in parts.values() if part is not None)

    def open(self, ahead: int = BLOCK) -> BinaryIO:
        """Open the file for reading at any place; at least `ahead` bytes are read at once."""
        return cast(BinaryIO, io.BufferedReader(_Reader(self), ahead))

    def _fetch(self, numbers: range) -> dict[int, bytes]:
        start, stop = numbers.start * BLOCK, min(numbers.stop * BLOCK, self.size)
        data = self._bytes(start, stop)
        blocks = {n: data[n * BLOCK - start : (n + 1) * BLOCK - start] for n in numbers}
        for number, block in blocks.items():
            self._cache.write(self.key, number, block)
        with self._lock:
            self._unsure += numbers
        return blocks

    def _bytes(self, start: int, stop: int) -> bytes:
        def attempt() -> bytes:
            try:
                return fetch(self.url, start, stop)
            except OSError:
                self._check_version()  # a file that became shorter no longer has these bytes
                raise

        return patiently(self.url, attempt, in_run=True)

    def _look_again(self) -> None:
        with self._lock:
            if self._unsure and time.monotonic() >= self._next_look:
                patiently(self.url, self._check_version, in_run=True)
                self._unsure.clear()
                self._next_look = time.monotonic() + LOOK_EVERY

    def _check_version(self) -> None:
        """Raise ConfigError if the file has changed; delete blocks of the new version first."""
        size, version = look(self.url)
        # adlfs before 2026.5 quotes ETags of single files, but not in lists.
        if (size, version.strip('"')) == (self.size, self.version.strip('"')):
            return
        for number in self._unsure:
            self._cache.remove(self.key, number)
        message = (
            f'has changed while the run was reading it: {self.size} bytes {self.version} when it '
            f'was opened, {size} bytes {version} now; restore it, and start the run again to '
            'resume from its last checkpoint'
        )
        raise mistake(self.url, message)

    def is_at(self, path: Path) -> bool:
        """Whether `path` is a complete copy of the file; if so, its time of last use is now."""
        with suppress(FileNotFoundError):
            os.utime(path)
            return path.stat().st_size == self.size
        return False

    def download(self, path: Path) -> None:
        """Write the whole file to `path` in the cache, unless it is already there.

        If a process was killed, the next one continues with its part of the copy. Raises
        ConfigError if the disk is full, or if the file changes meanwhile.
        """
        if self.is_at(path):
            return
        new = path.with_name(f'.{path.name}.part')  # hidden, so that no corpus contains it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._copy(new)
            patiently(self.url, self._check_version, in_run=True)
            os.replace(new, path)
        except OSError as error:
            message = (
                f'{self._cache.folder} cannot be written: {error.strerror}; free disk space for '
                f'{self.size / 1e9:.1f} GB of {self.url}, or choose a folder on another disk'
            )
            raise mistake('run.data_cache', message) from error
        self._cache.added(self.size)

    def _copy(self, path: Path) -> None:
        """Write the file to `path` from its last whole piece on, each piece at its place.

        Where locks do not work, two processes therefore write the same bytes.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            done = min(os.fstat(descriptor).st_size, self.size) // PIECE * PIECE
            for start in range(done, self.size, PIECE):
                rest = self._bytes(start, min(start + PIECE, self.size))
                while rest:
                    count = os.pwrite(descriptor, rest, start)
                    rest, start = rest[count:], start + count
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Reader(io.RawIOBase):
    """A position in a remote file."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._file.size)
        data = self._file.read(self._at, stop) if self._at < stop else b''
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _runs(numbers: list[int]) -> Iterator[range]:
    """Yield consecutive numbers as ranges, which one request fetches."""
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        for first in range(run[0], run[-1] + 1, BLOCKS_AT_ONCE):
            yield range(first, min(first + BLOCKS_AT_ONCE, run[-1] + 1))
