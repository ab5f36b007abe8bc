"""The SHA-256 digests of a checkpoint's files, in the step's own folder. Imports no jax.

`sha256sum -c SHA256SUMS` checks them, too. Orbax does not check contents: after a bit flip in a
file, it silently restores wrong weights.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megajax.base.files.locks import folder_lock
from megajax.base.files.outputs import write_file
from megajax.base.render.text import typed
from megajax.core.config import CheckpointError, ConfigError
from megajax.core.config.load import CONFIG, run_like, runs_in
from megajax.core.config.overrides import typed_override
from megajax.runtime.checkpoint.record import VALIDATION, recorded_step

SUMS = 'SHA256SUMS'
COMMIT = 'commit_success.txt'  # Orbax's last file; a step without it was never finished
# Orbax adds the time to this file after the digests are written, and can restore without the file.
STAMP = '_CHECKPOINT_METADATA'
LATER = frozenset({SUMS, COMMIT, STAMP, VALIDATION})
UNREADABLE = 'cannot be read'  # how the fault of a file that was not compared begins
THREADS = min(4, os.cpu_count() or 1)

logger = logging.getLogger(__name__)


class Sums(NamedTuple):
    """The contents of a step, or of a part of it, when it was written."""

    digests: dict[str, str]  # SHA-256 by path
    size: int  # total number of bytes

    def __str__(self) -> str:
        """Return the text of the file SUMS."""
        lines = [f'{self.digests[name]}  {name}\n' for name in sorted(self.digests)]
        return ''.join([*lines, f'# {len(lines)} files, {self.size} bytes\n'])


def hash_part(folder: Path, part: str) -> str:
    """Hash the files in `part`, a folder of a step; return them as a part for `write_sums`."""
    return str(_hashed(folder, [f'{part}/{name}' for name in _files(folder / part)]))


def write_sums(folder: Path, parts: Iterable[str] = ()) -> None:
    """Hash the files in `folder`, and write all digests there, atomically.

    Files in `parts`, which other processes have hashed with `hash_part`, are not read. Raises
    OSError if the number of bytes here is not the number of bytes that were hashed.
    """
    hashed = [_parsed(part) for part in parts]
    digests = {name: digest for sums in hashed for name, digest in sums.digests.items()}
    hashed.append(_hashed(folder, _files(folder) - digests.keys()))
    digests |= hashed[-1].digests
    size, seen = sum(sums.size for sums in hashed), _total_size(folder, digests)
    if size != seen:
        raise OSError(f'{folder} holds {seen} bytes instead of {size}')
    write_file(folder / SUMS, str(Sums(digests, size)).encode())


def read_sums(folder: Path) -> Sums:
    """Return the digests of a step. Raises ValueError if they are incomplete."""
    sums = _parsed((folder / SUMS).read_bytes().decode())
    if not sums.digests:
        raise ValueError('incomplete')
    return sums


def changed_files(folder: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the fault of each file in `folder` whose SHA-256 is not its digest."""
    with ThreadPoolExecutor(THREADS) as pool:
        faults = pool.map(lambda name: _compare(folder / name, digests[name]), digests)
        return {name: fault for name, fault in zip(digests, faults, strict=True) if fault}


def problems(folder: Path, *, contents: bool = True) -> list[str]:
    """Return the faults of a step, one line per file; empty if the step is intact.

    Without `contents` only names and sizes are checked.
    """
    if folder.is_symlink():
        return ['is a symbolic link']
    if not (folder / COMMIT).is_file():
        return [f'was never finished: there is no {COMMIT}']
    if (step := foreign_step(folder)) is not None:
        fix = f'rename it to {step} if that name is free, or to a name that is not a number'
        return [f'holds step {step}: {fix}']
    try:
        sums = read_sums(folder)
    except FileNotFoundError:
        return [f'{SUMS} is missing']
    except OSError as error:
        return [f'{SUMS} {UNREADABLE}: {error.strerror}']
    except ValueError:
        return [f'{SUMS} is damaged']
    files = _files(folder)
    faults = {name: 'is missing' for name in sums.digests if name not in files}
    faults |= {
        name: 'is a symbolic link'
        for name in sums.digests
        if name in files and (folder / name).is_symlink()
    }
    if contents:
        present = {name: digest for name, digest in sums.digests.items() if name not in faults}
        faults |= changed_files(folder, present)
    if not faults and (size := _total_size(folder, sums.digests)) != sums.size:
        return [f'holds {size} bytes instead of {sums.size}']
    return [f'{name} {faults[name]}' for name in sorted(faults)]


def strangers(folder: Path) -> list[str]:
    """Return the files that were added to a step's folder after it was written."""
    return sorted(_files(folder) - read_sums(folder).digests.keys())


def is_finished(folder: Path) -> bool:
    """Whether the folder holds a finished save, or links to one.

    Raises ConfigError if this user may not read it.
    """
    with readable(folder):
        return (folder / COMMIT).is_file()


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Raise ConfigError if the block opens a file in a folder that this user may not read."""
    try:
        yield
    except PermissionError as error:
        raise ConfigError(
            f'{error.filename or folder} cannot be read: {error.strerror}; '
            'let this user read the folder of the run'
        ) from error


def foreign_step(folder: Path) -> int | None:
    """Return the step in a folder whose name is a different step's number, or None otherwise.

    Such a folder was copied or renamed.
    """
    if not is_step_name(folder.name) or folder.is_symlink() or not is_finished(folder):
        return None
    step = recorded_step(folder)
    return None if step == int(folder.name) else step


def find_foreign(folder: Path) -> list[Path]:
    """Return finished checkpoints in folders named after a different step, which runs ignore."""
    if not folder.is_dir():
        return []
    with readable(folder):
        foreign = [path for path in folder.iterdir() if foreign_step(path) is not None]
    return sorted(foreign, key=lambda path: int(path.name))


def find_steps(folder: Path) -> list[int]:
    """Return the finished steps in order, intact or not.

    Links count, so that they can be rejected by name; folders that contain a different step do not.
    """
    if not folder.is_dir():
        return []
    with readable(folder):
        names = [path for path in folder.iterdir() if is_step_name(path.name)]
        return sorted(
            int(path.name) for path in names if is_finished(path) and foreign_step(path) is None
        )


def find_step(path: Path) -> Path:
    """Return the finished checkpoint that RUN/checkpoints/STEP or RUN/STEP stands for.

    Raises ConfigError with the steps that exist if there is none.
    """
    for candidate in (path, path.parent / 'checkpoints' / path.name):
        if is_finished(candidate):
            return candidate
    near = path.parent, path.parent / 'checkpoints', path / 'checkpoints', path
    steps = next(filter(None, map(find_steps, near)), [])
    runs = runs_in(path)
    choice = (
        f'choose one of steps {", ".join(map(str, steps))}'
        if steps
        else f'give one of its runs: {", ".join(runs)}'
        if runs
        else 'its run has finished no save yet; resume it: megajax train '
        + typed_override('run.dir', path)
        if (path / CONFIG).is_file()
        else f'did you mean {near_run}?'
        if (near_run := run_like(path) or run_like(path.parent))
        else "give a run's directory, or RUN/STEP"
    )
    raise ConfigError(f'{path}: no finished checkpoint there; {choice}')


def find_candidates(path: Path) -> list[Path]:
    """Return the finished checkpoints of RUN, the newest first, or the one of RUN/STEP.

    Raises ConfigError if there is none.
    """
    with readable(path):
        folder = path / 'checkpoints' if (path / 'checkpoints').is_dir() else path
    return [folder / str(step) for step in reversed(find_steps(folder))] or [find_step(path)]


@contextmanager
def sound_checkpoint(
    path: Path, problems: Callable[[Path], list[str]] = problems
) -> Iterator[Path]:
    """Yield the folder of the checkpoint that `path` stands for, verified by its digests.

    If the path is a run, this is its newest intact checkpoint. The run does not delete the
    checkpoint during the block. `problems` verifies a step. Raises ConfigError if there is no
    finished checkpoint, and CheckpointError if none is intact.
    """
    tried: set[Path] = set()
    # Read the list again each time: a live run may have written a step and deleted others.
    while untried := [each for each in find_candidates(path) if each not in tried]:
        candidate = untried[0]
        tried.add(candidate)
        with folder_lock(candidate, shared=True) as is_there:
            if not is_there:
                continue
            faults = problems(candidate)
            if not faults:
                yield candidate.absolute()
                return
        logger.warning('checkpoint %s is rejected: %s', candidate, faults[0])
    raise unusable(path)


def unusable(path: Path) -> CheckpointError:
    """Return the error for a checkpoint that is damaged."""
    return CheckpointError(f'{path} cannot be used: run megajax checkpoint verify {typed(path)}')


def is_step_name(name: str) -> bool:
    """Whether Orbax would take this name for the name of a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def _files(folder: Path) -> set[str]:
    """Return the files of a step by relative path; folders that are links are not entered."""
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix() for path in paths} - LATER


def _hashed(folder: Path, names: Iterable[str]) -> Sums:
    names = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name), names))
    return Sums(dict(zip(names, digests, strict=True)), _total_size(folder, names))


def _parsed(text: str) -> Sums:
    """Return the digests in the text of a file SUMS. Raises ValueError if lines are missing."""
    *lines, last = text.removesuffix('\n').split('\n')
    matches = [re.fullmatch(r'([0-9a-f]{64})  (\S.*)', line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match}
    total = re.fullmatch(r'# (\d+) files, (\d+) bytes', last)
    if total is None or not len(lines) == len(digests) == int(total[1]):
        raise ValueError('incomplete')
    return Sums(digests, int(total[2]))


def _digest(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _compare(path: Path, digest: str) -> str | None:
    """Return the fault of a file, or None."""
    try:
        if _digest(path) == digest:
            return None
        return 'differs from what was written' if _file_size(path) else 'is empty'
    except OSError as error:
        return f'{UNREADABLE}: {error.strerror}'


def _total_size(folder: Path, names: Iterable[str]) -> int:
    return sum(_file_size(folder / name) for name in names)


def _file_size(path: Path) -> int:
    """Return the bytes of a file, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a run is deleting the step right now
        return 0
