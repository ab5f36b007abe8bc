"""The folder OUT.partial, where token files grow until they are complete, and from which a killed build goes on."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from megajax.config.errors import ConfigError, Problem
from megajax.data.build.inputs import UNIT, Position
from megajax.data.tokens.indexed import write_index

TOKENS, LENGTHS, DOCUMENTS, INDEX = 'tokens', 'lengths', 'documents', 'index'
TOKENIZER, MANIFEST, PROGRESS, LOCK, NEW = (
    'tokenizer.json',
    'manifest.json',
    'progress.json',
    'lock',
    'new',
)
FINAL = {
    TOKENIZER: '.tokenizer.json',
    MANIFEST: '.json',
    TOKENS: '.bin',
    INDEX: '.idx',
}  # in the order of the renames
NAMES = frozenset({LENGTHS, DOCUMENTS, PROGRESS, LOCK, NEW, *FINAL})


class UnfinishedError(ConfigError):
    """The build cannot go on now, but what is there is sound, and the same command continues."""


class Progress(BaseModel):
    """How far a build is. `fingerprint` stands for all that determines the bytes.

    `tokens` counts those written, `open_tokens` those of them that belong to a document that goes on; `complete` means that nothing
    but the renames is left.
    """

    model_config = ConfigDict(extra='forbid', strict=True)

    fingerprint: str
    complete: bool = False
    position: Position = Position()
    itemsize: int = 0
    tokens: int = 0
    open_tokens: int = 0
    sequences: int = 0
    documents: int = 0
    max_token: int = 0
    text_bytes: int = 0
    skipped: int = 0
    skipped_places: list[str] = []

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the growing files."""
        return {
            TOKENS: self.tokens * self.itemsize,
            LENGTHS: 4 * self.sequences,
            DOCUMENTS: 8 * (1 + self.documents),
        }


def finals(out: Path) -> list[Path]:
    """The files of a complete build, in the order in which they appear."""
    return [Path(f'{out}{suffix}') for suffix in FINAL.values()]


def read_progress(out: Path) -> Progress | None:
    """How far a build to `out` came, None if there is none that can go on."""
    try:
        return Progress.model_validate_json((_folder(out) / PROGRESS).read_bytes())
    except (OSError, ValueError):
        return None


class Partial:
    """OUT.partial, locked; errors of the disk are ConfigErrors that name the file and what it held."""

    def __init__(self, out: Path) -> None:
        self.folder = _folder(out)
        self._out = out
        self._files: dict[str, Any] = {}
        self._digest = sha256()

    @classmethod
    @contextmanager
    def lock(cls, out: Path) -> Iterator[Self]:
        """Make the folder if need be, and hold it; raises ConfigError if another process does, or it is none of ours."""
        partial = cls(out)
        with _errors(partial.folder):
            partial.folder.mkdir(exist_ok=True)
            if strange := sorted({path.name for path in partial.folder.iterdir()} - NAMES):
                raise _problem(
                    partial.folder,
                    f'holds {strange[0]}, which no build wrote; move the folder, or choose another OUT',
                )
            lock = (partial.folder / LOCK).open('w')
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(lock.fileno()), os.stat(partial.folder / LOCK)):
                    raise FileNotFoundError  # another build has just ended
            except OSError as error:
                raise _problem(
                    partial.folder,
                    'another build is writing here; wait for it, or choose another OUT',
                ) from error
            try:
                yield partial
            finally:
                partial.close()

    def start(self, progress: Progress) -> None:
        """Forget what is there, and begin."""
        for name in NAMES - {LOCK}:
            (self.folder / name).unlink(missing_ok=True)
        self.save(progress)

    def open(self, progress: Progress) -> None:
        """Open the growing files, cut to what `progress` says; raises ConfigError if they hold less."""
        self._digest = sha256()
        for name, size in progress.sizes.items():
            path = self.folder / name
            with _errors(path):
                self._files[name] = file = open(path, 'ab+', buffering=0)  # noqa: SIM115
                if name == DOCUMENTS and not file.tell():
                    self.append(DOCUMENTS, np.zeros(1, '<i8'))
                if file.seek(0, os.SEEK_END) < size:
                    raise _problem(
                        path,
                        f'has {file.tell()} bytes instead of {size}; run the same command again, which starts afresh',
                    )
                file.truncate(size)
        self._files[TOKENS].seek(0)
        while chunk := self._files[TOKENS].read(UNIT):
            self._digest.update(chunk)

    def append(self, name: str, array: np.ndarray) -> None:
        """Write an array at the end of a growing file."""
        data = np.ascontiguousarray(array).data.cast('B') if array.size else memoryview(b'')
        with _errors(self.folder / name):
            rest = data
            while rest:
                rest = rest[self._files[name].write(rest) :]
        if name == TOKENS:
            self._digest.update(data)

    def checkpoint(self, progress: Progress) -> None:
        """From here on a build that is killed goes on after `progress`."""
        for name, file in self._files.items():
            with _errors(self.folder / name):
                os.fsync(file.fileno())
        self.save(progress)

    def save(self, progress: Progress) -> None:
        """Replace progress.json."""
        self.write(PROGRESS, progress.model_dump_json().encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file, which appears under its name when it is on the disk."""
        with _errors(self.folder / NEW), (self.folder / NEW).open('wb', buffering=0) as file:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        os.replace(self.folder / NEW, self.folder / name)

    def write_index(self, dtype: np.dtype) -> None:
        """Write the index of the tokens, lengths and documents."""
        path = self.folder / INDEX
        with _errors(path), path.open('wb') as file:
            write_index(file, dtype, self._array(LENGTHS, '<i4'), self._array(DOCUMENTS, '<i8'))
            file.flush()
            os.fsync(file.fileno())

    def _array(self, name: str, dtype: str) -> np.ndarray:
        path = self.folder / name
        return np.memmap(path, dtype, mode='r') if path.stat().st_size else np.empty(0, dtype)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the growing files."""
        while self._files:
            self._files.popitem()[1].close()

    def publish(self) -> None:
        """Rename what is complete to its final names, PREFIX.idx last, and take the folder away; may be repeated after a kill."""
        for name, final in zip(FINAL, finals(self._out), strict=True):
            try:
                os.replace(self.folder / name, final)
                sync(final.parent)
            except FileNotFoundError:
                pass  # renamed before a kill
            except OSError as error:
                message = f'cannot be renamed from {self.folder / name}: {error.strerror}; allow it, and the same command continues'
                raise UnfinishedError(Problem(path=str(final), message=message)) from error
        self.discard()

    def discard(self) -> None:
        """Take the folder away."""
        self.close()
        for name in (
            *sorted(NAMES - {PROGRESS, LOCK}),
            PROGRESS,
            LOCK,
        ):  # as long as there is anything, it says of what
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(out: Path) -> Path:
    return Path(f'{out}.partial')


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        held = f' after {path.stat().st_size} bytes' if path.is_file() else ''
        raise _problem(
            path, f'cannot be written{held}: {error.strerror}; make room, or choose another OUT'
        ) from error


def _problem(path: Path, message: str) -> ConfigError:
    return ConfigError(Problem(path=str(path), message=message))
