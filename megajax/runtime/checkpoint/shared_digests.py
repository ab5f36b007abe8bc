"""Verify a checkpoint in all processes of a run, each of which hashes a share of the files."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import jax

from megajax.runtime.checkpoint.digests import Changed, changed_files, file_size
from megajax.runtime.processes.consensus import text_from_first, texts_from_all


@contextmanager
def hashed_by_all(root: Path) -> Iterator[Changed]:
    """Yield to the first process a function like `changed_files` that all processes work for.

    All processes must enter the block, with their paths to the same directory. Checkpoints are
    found by their paths relative to it. The other processes must not use what the block yields:
    when they leave the block, they hash their shares until the first process leaves it, too.
    """
    if jax.process_count() == 1:
        yield changed_files
        return
    if jax.process_index() == 0:
        yield lambda folder, digests: _changed(root, text_from_first(_task(root, folder, digests)))
        text_from_first('')
        return
    yield changed_files
    while task := text_from_first(''):
        _changed(root, task)


def _task(root: Path, folder: Path, digests: Mapping[str, str]) -> str:
    """Describe the files to hash, the largest first, so that equal shares are of equal size."""
    names = sorted(digests, key=lambda name: file_size(folder / name), reverse=True)
    return json.dumps([os.path.relpath(folder, root), {name: digests[name] for name in names}])


def _changed(root: Path, task: str) -> dict[str, str]:
    """Hash this process's share of the files; return the faults that all processes find."""
    relative, digests = json.loads(task)
    folder = Path(os.path.normpath(root / relative))
    share = dict(islice(digests.items(), jax.process_index(), None, jax.process_count()))
    faults = changed_files(folder, share)
    texts = texts_from_all(json.dumps(faults) if faults else '')
    return {name: fault for text in texts if text for name, fault in json.loads(text).items()}
