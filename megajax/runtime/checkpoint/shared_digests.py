"""Verify a checkpoint in all processes of a run, each of which hashes a share of the files."""

import json
import socket
from collections.abc import Collection
from itertools import islice
from pathlib import Path

import jax

from megajax.base.errors import reason
from megajax.core.config import CheckpointError
from megajax.runtime.checkpoint.digests import (
    SUMS,
    UNREADABLE,
    changed_files,
    problems,
    read_sums,
)
from megajax.runtime.processes.consensus import text_from_first, texts_from_all


class UnreadableError(CheckpointError):
    """A file that one of several processes cannot read, but that another one can."""


def shared_problems(folder: Path) -> list[str]:
    """Return the faults of a step as `problems` does; all processes share the hashing.

    All processes must call it, with their paths to the same folder. A file that a process cannot
    read is a fault if neither the first nor the last process can read it. If one of them can, all
    processes raise UnreadableError: the fault may be a host's, and the step sound.
    """
    if jax.process_count() == 1:
        return problems(folder)
    faults = problems(folder, contents=False) if jax.process_index() == 0 else []
    faults = json.loads(text_from_first(json.dumps(faults)))
    if faults and not faults[0].startswith(f'{SUMS} {UNREADABLE}'):
        return faults
    mine = _faults_of_share(folder)
    texts = texts_from_all(json.dumps([socket.gethostname(), mine]) if mine else '')
    found: dict[str, str] = {}
    unread: dict[str, tuple[int, str]] = {}  # the process that cannot read a file, and its host
    for index, text in enumerate(texts):
        host, theirs = json.loads(text) if text else ('', {})
        for name in sorted(theirs.keys() - found.keys()):
            found[name] = theirs[name]
            if theirs[name].startswith(UNREADABLE):
                unread[name] = index, host
    if name := _read_elsewhere(folder, unread):
        index, host = unread[name]
        raise UnreadableError(
            f'{folder / name} {found[name]} (process {index} on {host}), but another process can '
            f'read it; mount the file system on {host} again, or make the file readable there; '
            f'only if neither helps, move {folder} away to do without this checkpoint'
        )
    return [f'{name} {found[name]}' for name in sorted(found)]


def _read_elsewhere(folder: Path, names: Collection[str]) -> str:
    """Return one of the files that the first or the last process can read, or '' if there is none.

    These two are on different hosts if the run has several. They stop at the first file that they
    can read: if a host has lost its file system, the others can read all files.
    """
    if not names:
        return ''
    mine = ''
    if jax.process_index() in (0, jax.process_count() - 1):
        # No file has an empty digest, so each file has a fault.
        faults = ((name, changed_files(folder, {name: ''})[name]) for name in names)
        mine = next((name for name, fault in faults if not fault.startswith(UNREADABLE)), '')
    return next(filter(None, texts_from_all(mine)), '')


def _faults_of_share(folder: Path) -> dict[str, str]:
    """Hash this process's share of the files; return the fault of each changed file."""
    try:
        digests = read_sums(folder).digests
    except (OSError, ValueError) as error:  # the first process does not find the file damaged
        return {SUMS: f'{UNREADABLE}: {reason(error)}'}
    # The order of the digests is random, so each share has files of all sizes.
    names = sorted(digests, key=lambda name: (digests[name], name))
    share = islice(names, jax.process_index(), None, jax.process_count())
    return changed_files(folder, {name: digests[name] for name in share})
