"""A cache of blocks of remote files on a local disk, which the processes of a host share.

Each block is a separate file that ends with the block's CRC-32. It appears under its name only when
it is complete, so processes need no lock, and a kill at any point leaves the cache usable. A block
that the disk has damaged counts as missing.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from zlib import crc32

from megajax.base.errors import mistake
from megajax.base.files.locks import folder_lock
from megajax.base.files.outputs import replace_file

BLOCK = 1 << 18  # bytes
IN_FOLDER = 1 << 10  # number of blocks in a folder
CRC_BYTES = 4
# The cache is trimmed to `KEPT` of its limit whenever a process has added `LOOK_AFTER` of the
# limit.
LOOK_AFTER, KEPT = 0.01, 0.9

logger = logging.getLogger(__name__)


class BlockCache:
    """Blocks by the key of their file and their number; the least recently used are deleted.

    `limit` is in bytes. Raises ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        self._added, self._sound = 0, set[tuple[str, int]]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder):
                pass
        except OSError as error:
            message = f'{folder} cannot be written: {error.strerror}; choose another folder'
            raise mistake('run.data_cache', message) from error
        self.trim()

    def read(self, key: str, number: int, start: int, stop: int) -> bytes | None:
        """Return bytes `start` up to `stop` of a block, or None if the cache does not have it.

        The checksum is compared when a process first reads the block.
        """
        try:
            with self._path(key, number).open('rb', buffering=0) as file:
                os.utime(file.fileno())  # the time of its last use
                if (key, number) in self._sound:
                    return os.pread(file.fileno(), stop - start, start)
                content = file.read()
        except OSError:
            return None
        block = content[:-CRC_BYTES]
        if content[-CRC_BYTES:] != _crc(block):
            return None
        self._sound.add((key, number))
        return block[start:stop]

    def write(self, key: str, number: int, block: bytes) -> None:
        """Add a block; if the disk is full, log a warning and continue without it."""
        path = self._path(key, number)
        try:
            replace_file(path, block + _crc(block))
        except OSError as error:
            logger.warning('run.data_cache: %s cannot be written: %s', path, error.strerror)
        self.added(len(block))

    def remove(self, key: str, number: int) -> None:
        """Delete a block."""
        self._path(key, number).unlink(missing_ok=True)

    def added(self, size: int) -> None:
        """Count bytes that were added to the cache's folder; trim the cache if there are many."""
        self._added += size
        if self._added > LOOK_AFTER * self._limit:
            self._added = 0
            self.trim()

    def trim(self) -> None:
        """Delete the least recently used files if they exceed the limit.

        Files in folders that are locked are in use, and are kept.
        """
        with ExitStack() as locks:

            def is_free(folder: Path) -> bool:
                return locks.enter_context(folder_lock(folder, shared=False))

            if not is_free(self.folder):  # another process trims it
                return
            folders = [path for path in self.folder.iterdir() if path.is_dir()]
            free = {str(path) for path in folders if is_free(path)}
            files = {str(folder): list(_files(folder)) for folder in folders}
            total = sum(size for found in files.values() for _, size, _ in found)
            if total <= self._limit:
                return
            for _, size, path in sorted(file for folder in free for file in files[folder]):
                if total <= KEPT * self._limit:
                    break
                with suppress(OSError):
                    os.unlink(path)
                total -= size

    def _path(self, key: str, number: int) -> Path:
        return self.folder / key / str(number // IN_FOLDER) / str(number)


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of a folder during the block; wait until no other process has it.

    File systems without locks give no protection, but the cache is correct without it.
    """
    with folder_lock(folder, shared=shared) as is_free:
        if is_free:
            yield
            return
    logger.info('data       waiting for another process that prepares %s', folder)
    with folder_lock(folder, shared=shared, wait=True):
        yield


def _crc(block: bytes) -> bytes:
    return crc32(block).to_bytes(CRC_BYTES, 'little')


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield the time of last use, the size and the path of each file."""
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            with suppress(OSError):
                status = os.stat(path)
                yield status.st_mtime, status.st_size, path
