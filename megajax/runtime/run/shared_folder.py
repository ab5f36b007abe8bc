"""Check that all processes of a run see the same run directory.

Checkpoints are written by all processes into one directory. If the hosts do not share it, no
checkpoint can ever be complete.
"""

import contextlib
import os
import secrets
import socket
import time
from pathlib import Path

import jax
import numpy as np

from megajax.core.config import ConfigError, mistake
from megajax.runtime.processes.consensus import from_all, from_first

# Seconds within which a file of the first process must appear in all processes: a client of NFS may
# not look again for a minute in a directory that it has seen.
SECONDS = 60.0
HOST_BYTES = 64  # maximum length of a host's name in the error


def check_shared(folder: Path) -> None:
    """Raise ConfigError in all processes if one of them does not see the first process's `folder`.

    All processes must call it, and the folder must exist in the first process.
    """
    if jax.process_count() == 1:
        return
    own = [secrets.randbits(31) for _ in range(4)]
    if jax.process_index() == 0:
        _create(_path(folder, own))
    path = _path(folder, from_first(*own))  # only now does any process look for the file
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b'\0')
    answers = from_all(_appears(path), *name)
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            path.unlink()
    if answers[:, 0].all():
        return
    first, *others = (f'process {i} on {_host(row)}' for i, row in enumerate(answers))
    without = [each for each, row in zip(others, answers[1:], strict=True) if not row[0]]
    message = (
        f'{folder.absolute()} is not the same directory in all processes: '
        f'{" and ".join(without[:3])}{" and others" if len(without) > 3 else ""} did not find the '
        f'file that {first} wrote there; use a directory on a file system that all hosts share'
    )
    raise mistake('run.dir', message)


def _path(folder: Path, token: list[int]) -> Path:
    return folder.absolute() / f'.shared-{"".join(f"{part:08x}" for part in token)}'


def _create(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be written: {error.strerror}; allow it, or choose another run.dir'
        ) from error


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SECONDS
    while not os.path.exists(path):  # False also for a folder that this process may not enter
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _host(answer: np.ndarray) -> str:
    return bytes(answer[1:].astype(np.uint8)).rstrip(b'\0').decode(errors='replace')
