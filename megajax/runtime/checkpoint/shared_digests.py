"""Verify a checkpoint in all processes of a run, each of which hashes a share of the files."""

import json
import socket
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
    """A file that the first process finds, but that one of several processes cannot read."""


def shared_problems(folder: Path) -> list[str]:
    """Return the faults of a step as `problems` does; all processes share the hashing.

    All processes must call it, with their paths to the same folder. Raises UnreadableError in all
    of them if one cannot read a file: the fault may be its host's, and the step sound.
    """
    if jax.process_count() == 1:
        return problems(folder)
    faults = problems(folder, contents=False) if jax.process_index() == 0 else []
    faults = json.loads(text_from_first(json.dumps(faults)))
    if faults and not faults[0].startswith(f'{SUMS} {UNREADABLE}'):
        return faults
    faults = []
    mine = _faults_of_share(folder)
    texts = texts_from_all(json.dumps([socket.gethostname(), mine]) if mine else '')
    for index, text in enumerate(texts):
        host, found = json.loads(text) if text else ('', {})
        for name, fault in sorted(found.items()):
            if fault.startswith(UNREADABLE):
                raise UnreadableError(
                    f'{folder / name} {fault} (process {index} on {host}); make it readable there, '
                    f'or move {folder} away to do without this checkpoint'
                )
            faults.append(f'{name} {fault}')
    return sorted(faults)


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
