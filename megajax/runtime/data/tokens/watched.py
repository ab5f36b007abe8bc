"""Watch token files for changes during a run, and check every id when it is read.

If a mapped file is truncated, the process ends with SIGBUS; `preadv` reports a short read instead.
"""

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax.base.errors import ConfigError, mistake
from megajax.runtime.data.tokens.indexed import Sequences, paths
from megajax.runtime.data.tokens.token_ids import first_bad

LOOK_EVERY = 1.0  # seconds between checks of a file's size and modification time
AGAIN = 'restore the file, and start the run again to resume from its last checkpoint'

logger = logging.getLogger(__name__)


def watched(sequences: Sequences, vocab_size: int) -> Sequences:
    """Return the sequences of a pair of files with a `read` that checks ids and files.

    It raises ConfigError, with file and byte, for an id that is negative or not below `vocab_size`,
    and if the files were written to or truncated after they were opened. If an opened file is
    replaced by another file of the same name, the opened file is still read to the end of the run.
    """
    if not len(sequences.tokens):
        return sequences
    return replace(sequences, reader=_WatchedTokens(sequences, vocab_size).read)


class _Look(NamedTuple):
    inode: int
    size: int
    mtime_ns: int


class _WatchedTokens:
    def __init__(self, sequences: Sequences, vocab_size: int):
        self._sequences, self._vocab_size = sequences, vocab_size
        self._path, _ = paths(sequences.name)
        self._file = self._path.open('rb', buffering=0)
        self._seen = {path: _look(path) for path in paths(sequences.name)}
        self._fingerprint = sequences.fingerprint()
        self._touched: set[Path] = set()
        self._next_look = time.monotonic() + LOOK_EVERY

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return token ids `start` to `stop`."""
        if time.monotonic() >= self._next_look:
            self._look_again()
        ids = np.empty(stop - start, self._sequences.tokens.dtype)
        self._fill(ids.view(np.uint8).data, start * ids.itemsize)
        if (bad := first_bad(ids, self._vocab_size)) is not None:
            raise _problem(
                self._path,
                f'at byte {(start + bad) * ids.itemsize}: token {start + bad} is {ids[bad]}, '
                f'but the model has {self._vocab_size} ids: '
                'the file was written to after it was checked',
            )
        return ids

    def _fill(self, rest: memoryview, offset: int) -> None:
        while rest:
            try:
                count = os.preadv(self._file.fileno(), [rest], offset)
            except OSError as error:
                raise _problem(
                    self._path, f'at byte {offset}: cannot be read: {error.strerror}'
                ) from error
            if not count:
                raise _problem(
                    self._path,
                    f'ends before byte {offset + len(rest)}, '
                    f'but had {self._size()} bytes when it was opened',
                )
            rest, offset = rest[count:], offset + count

    def _look_again(self) -> None:
        self._next_look = time.monotonic() + LOOK_EVERY
        for path, before in self._seen.items():
            now = _look(path)
            if now is None or before is None or now.inode != before.inode or now == before:
                continue
            if now.size != before.size:
                raise _problem(
                    path, f'has {now.size} bytes, but had {before.size} when it was opened'
                )
            self._seen[path] = now
            if self._sequences.fingerprint() != self._fingerprint:
                raise _problem(
                    path,
                    'was written to: its first or last million entries have changed '
                    'since it was opened',
                )
            if path not in self._touched:
                self._touched.add(path)
                logger.warning(
                    '%s was touched while the run reads it: '
                    'its size and its first and last million entries are unchanged',
                    path,
                )

    def _size(self) -> int:
        return self._sequences.tokens.nbytes


def _look(path: Path) -> _Look | None:
    """Return the status that changes when a file is written to, or None if the file is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Look(status.st_ino, status.st_size, status.st_mtime_ns)


def _problem(path: Path, message: str) -> ConfigError:
    return mistake(path, f'{message}; {AGAIN}')
