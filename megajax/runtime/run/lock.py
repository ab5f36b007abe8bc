"""The lock of a run directory: only one run at a time writes there, and a lock file names it."""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import jax

from megajax.base.files.json_file import parse_json
from megajax.base.files.locks import TAKEN, lock
from megajax.core.config import ConfigError
from megajax.core.config.recorded import LOCK

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the run directory during the block; the first process does so for all processes.

    The directory is created if it does not exist. Raises ConfigError if another run has the lock.
    The kernel releases a lock whenever its process ends, so the lock of a killed process is taken
    over, with a warning.
    """
    if jax.process_index():
        yield
        return
    path = folder / LOCK
    with _open(path) as file:
        _take(path, file)
        if holder := _holder(file):
            logger.warning('%s: stale lock of %s (process died); taking over', path, holder)
        start = f'{datetime.datetime.now(datetime.UTC):%FT%TZ}'
        _write(file, {'host': socket.gethostname(), 'pid': os.getpid(), 'start': start})
        try:
            yield
        finally:
            # The file is not unlinked: a process that has already opened it would lock a file
            # without a name.
            _write(file, None)


def running_in(folder: Path) -> str | None:
    """Return the process, other than this one, that runs in a folder, or None if there is none."""
    try:
        with (folder / LOCK).open(errors='replace') as file:
            holder = _holder(file)
            if holder is None or _is_own(file):
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # a killed process does not hold it
    except OSError as error:
        return holder if error.errno in TAKEN else None
    return None


def _is_own(file: IO[str]) -> bool:
    own = f'pid {os.getpid()} on host {socket.gethostname()} '
    return (_holder(file) or '').startswith(own)


def _open(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o640), 'r+', errors='replace'
        )
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be written: {error.strerror}; allow it, or choose another run directory'
        ) from error


def _take(path: Path, file: IO[str]) -> None:
    try:
        lock(file.fileno(), path)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileNotFoundError  # a start that failed has just deleted its new directory
    except (BlockingIOError, FileNotFoundError) as error:
        holder = _holder(file) or 'a process that is starting or ending'
        raise ConfigError(
            f'{path.parent} is locked by {holder}: wait for it, stop it, or choose another run '
            'directory'
        ) from error


def _holder(file: IO[str]) -> str | None:
    """Return the holder, as 'pid 12 on host a since 2026-01-01T00:00:00Z'; None if not named."""
    file.seek(0)
    text = file.read(1000)
    try:
        holder = parse_json(text)
        return f'pid {holder["pid"]} on host {holder["host"]} since {holder["start"]}'
    except (ValueError, KeyError, TypeError):
        return 'an unknown process' if text.strip() else None


def _write(file: IO[str], holder: dict[str, Any] | None) -> None:
    # On a full disk, the lock works but does not name its holder.
    with contextlib.suppress(OSError):
        os.ftruncate(file.fileno(), 0)
        # A buffer would keep the text that it failed to write, and fail again when the file closes.
        os.pwrite(file.fileno(), f'{json.dumps(holder)}\n'.encode() if holder else b'', 0)
