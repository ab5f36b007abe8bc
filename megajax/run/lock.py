"""One run writes to a run directory at a time: a locked file there says which."""

import contextlib
import datetime
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from megajax.config import ConfigError

LOCK = 'lock'
TAKEN = (errno.EACCES, errno.EAGAIN)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run directory, made if need be, while the block runs; of many processes the first holds it for all.

    Raises ConfigError if another run does. The kernel lets go when a process ends, however it ends, so what a killed one left
    is taken over, with a warning.
    """
    if jax.process_index():
        yield
        return
    path = folder / LOCK
    with _open(path) as file:
        _take(path, file)
        if left := _holder(file):
            logger.warning('%s: the run of %s ended without a word; taking over', path, left)
        _write(
            file,
            {
                'host': socket.gethostname(),
                'pid': os.getpid(),
                'start': f'{datetime.datetime.now(datetime.UTC):%FT%TZ}',
            },
        )
        try:
            yield
        finally:
            _write(
                file, None
            )  # and not unlinked: another may have opened it, and would hold a file without a name


def _open(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640), 'r+')
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be written: {error.strerror}; allow it, or choose another run.dir'
        ) from error


def _take(path: Path, file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in TAKEN:  # some network file systems have no locks
            logger.warning(
                '%s cannot be locked (%s): see to it that no other run writes here',
                path,
                error.strerror,
            )
            return
        holder = _holder(file) or 'a process that starts or ends'
        raise ConfigError(
            f'{path.parent} is locked by {holder}: wait for it, stop it, or choose another run.dir'
        ) from error


def _holder(file: IO[str]) -> str | None:
    """'pid 12 on host a since 2026-01-01T00:00:00Z', None if the file is empty."""
    file.seek(0)
    text = file.read(1000)
    try:
        told = json.loads(text)
        return f'pid {told["pid"]} on host {told["host"]} since {told["start"]}'
    except (ValueError, KeyError, TypeError):
        return 'an unknown process' if text.strip() else None


def _write(file: IO[str], holder: dict[str, Any] | None) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds, and cannot tell of whom
        file.seek(0)
        file.truncate()
        file.write(f'{json.dumps(holder)}\n' if holder else '')
        file.flush()
