"""File locks, which the kernel releases when the process that holds them ends for any reason."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TAKEN = (errno.EACCES, errno.EAGAIN)

logger = logging.getLogger(__name__)


def lock(descriptor: int, path: Path) -> None:
    """Take the exclusive lock of an open file or folder, without waiting.

    Raises BlockingIOError if another process has it. On network file systems without locks, it logs
    a warning that names `path`, and other processes are not kept out.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            raise BlockingIOError(error.errno, error.strerror, str(path)) from error
        logger.warning(
            '%s cannot be locked (%s): make sure that no other process writes here',
            path,
            error.strerror,
        )


@contextmanager
def folder_lock(folder: Path, *, shared: bool, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder during the block: shared to read it, exclusive to delete it.

    Yields False if another process holds a lock that conflicts, or if a folder to read is gone.
    With `wait`, waits until the lock is free. File systems without locks give no protection.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield not shared
        return
    except OSError:  # the block will raise an error with the reason
        yield True
        return
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
        is_free = True
    except OSError as error:
        is_free = error.errno not in TAKEN
    try:
        yield is_free
    finally:
        os.close(descriptor)
