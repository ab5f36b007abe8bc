"""SHA-256 of every file of a checkpoint, in the step's own folder, so that `sha256sum -c SHA256SUMS` checks it too. Imports no jax.

Orbax does not look at content: a flipped bit in a file restores as wrong weights without a word.
"""

import hashlib
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from megajax.checkpoint.record import VALIDATION, recorded_step
from megajax.config import CheckpointError, ConfigError

SUMS = 'SHA256SUMS'
COMMIT = 'commit_success.txt'  # Orbax's last file; a step without it was never finished
STAMP = (
    '_CHECKPOINT_METADATA'  # Orbax adds the time to it after the digests, and restores without it
)
LATER = frozenset({SUMS, COMMIT, STAMP, VALIDATION})
THREADS = min(4, os.cpu_count() or 1)

logger = logging.getLogger(__name__)


class Sums(NamedTuple):
    """What a step held when it was written: SHA-256 by path, and bytes in all."""

    digests: dict[str, str]
    size: int


def write_sums(folder: Path) -> None:
    """Hash what is in `folder` and put the digests there, complete or not at all."""
    names = sorted(_files(folder))
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda name: _digest(folder / name), names))
    size = sum(_size(folder / name) for name in names)
    lines = [f'{digest}  {name}\n' for name, digest in zip(names, digests, strict=True)]
    write_file(folder / SUMS, ''.join([*lines, f'# {len(names)} files, {size} bytes\n']).encode())


def read_sums(folder: Path) -> Sums:
    """The digests of a step. Raises ValueError if they are not whole."""
    *lines, last = (folder / SUMS).read_bytes().decode('ascii').removesuffix('\n').split('\n')
    matches = [re.fullmatch(r'([0-9a-f]{64})  (\S.*)', line) for line in lines]
    digests = {match[2]: match[1] for match in matches if match}
    total = re.fullmatch(r'# (\d+) files, (\d+) bytes', last)
    if total is None or not digests or not len(lines) == len(digests) == int(total[1]):
        raise ValueError('not whole')
    return Sums(digests, int(total[2]))


def problems(folder: Path, *, contents: bool = True) -> list[str]:
    """What is wrong with a step, a line for each file; nothing if it holds what was written. Without `contents` only names and sizes."""
    if folder.is_symlink():
        return ['is a symbolic link']
    if not (folder / COMMIT).is_file():
        return [f'was never finished: there is no {COMMIT}']
    if (step := foreign_step(folder)) is not None:
        return [f'holds step {step}: rename it to {step} if that is free, or to what is no number']
    try:
        sums = read_sums(folder)
    except FileNotFoundError:
        return [f'{SUMS} is missing']
    except (OSError, ValueError):
        return [f'{SUMS} is damaged']
    found = _files(folder)
    wrong = {name: 'is missing' for name in sums.digests if name not in found}
    wrong |= {
        name: 'is a symbolic link'
        for name in sums.digests
        if name in found and (folder / name).is_symlink()
    }
    there = [name for name in sums.digests if name not in wrong]
    if contents:
        with ThreadPoolExecutor(THREADS) as pool:
            findings = pool.map(lambda name: _compare(folder / name, sums.digests[name]), there)
            wrong |= {name: what for name, what in zip(there, findings, strict=True) if what}
    if not wrong and (size := sum(_size(folder / name) for name in there)) != sums.size:
        return [f'holds {size} bytes instead of {sums.size}']
    return [f'{name} {wrong[name]}' for name in sorted(wrong)]


def strangers(folder: Path) -> list[str]:
    """Files that were not there when the step was written."""
    return sorted(_files(folder) - read_sums(folder).digests.keys())


def is_finished(folder: Path) -> bool:
    """Whether a save came to its end here, or someone made a link to such a folder."""
    return (folder / COMMIT).is_file()


def foreign_step(folder: Path) -> int | None:
    """The step that a folder holds under the number of another one, as a copy or an exchange leaves it; None if it does not."""
    if not is_step_name(folder.name) or folder.is_symlink() or not is_finished(folder):
        return None
    step = recorded_step(folder)
    return None if step == int(folder.name) else step


def find_foreign(folder: Path) -> list[Path]:
    """The finished checkpoints that lie under the number of another step, in order; they are no steps of the run."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if foreign_step(path) is not None]
    return sorted(found, key=lambda path: int(path.name))


def find_steps(folder: Path) -> list[int]:
    """The steps that were finished, in order, sound or not. Links count, so that they can be refused by name; foreign ones do not."""
    if not folder.is_dir():
        return []
    finished = (path for path in folder.iterdir() if is_step_name(path.name) and is_finished(path))
    return sorted(int(path.name) for path in finished if foreign_step(path) is None)


def find_step(path: Path) -> Path:
    """The finished checkpoint that RUN/checkpoints/STEP or RUN/STEP stands for. Raises ConfigError with those that there are."""
    for candidate in (path, path.parent / 'checkpoints' / path.name):
        if is_finished(candidate):
            return candidate
    folder = path.parent / 'checkpoints'
    there = find_steps(folder) or find_steps(path / 'checkpoints') or find_steps(path)
    choice = (
        f'choose one of steps {", ".join(map(str, there))}'
        if there
        else "give a run's directory, or RUN/STEP"
    )
    raise ConfigError(f'{path}: no finished checkpoint there; {choice}')


def find_candidates(path: Path) -> list[Path]:
    """The finished checkpoints that RUN, the newest first, or RUN/STEP stands for. Raises ConfigError if there is none."""
    folder = path / 'checkpoints' if (path / 'checkpoints').is_dir() else path
    return [folder / str(step) for step in reversed(find_steps(folder))] or [find_step(path)]


def find_sound(path: Path) -> Path:
    """The folder of the checkpoint that `path` stands for, of a run the newest; all its files hold what was written."""
    for candidate in find_candidates(path):
        wrong = problems(candidate)
        if not wrong:
            return candidate.absolute()
        logger.warning('checkpoint %s is refused: %s', candidate, wrong[0])
    raise CheckpointError(f'{path} cannot be used: run megajax checkpoint verify {path}')


def is_step_name(name: str) -> bool:
    """Whether Orbax would take it for a step."""
    return name.isascii() and name.isdecimal() and str(int(name)) == name


def write_file(path: Path, content: bytes) -> None:
    """Write a file that appears under its name when it is on the disk."""
    new = path.with_name(f'{path.name}.new')
    with new.open('wb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> set[str]:
    """The files of a step by relative path; folders that are links are not entered."""
    paths = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix() for path in paths} - LATER


def _digest(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def _compare(path: Path, digest: str) -> str | None:
    """What is wrong with a file, if anything."""
    try:
        if _digest(path) == digest:
            return None
        return 'is not what was written' if _size(path) else 'is empty'
    except OSError as error:
        return f'cannot be read: {error.strerror}'


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # a run takes the step away at this moment
        return 0
