"""The folder OUT.partial, where token files grow until they are complete.

A killed build resumes from it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from megajax.base.errors import ConfigError, Problem, mistake
from megajax.base.files.locks import lock
from megajax.base.files.outputs import sync
from megajax.base.render.text import typed
from megajax.runtime.data.sources.pieces import UNIT, Position
from megajax.runtime.data.tokens.indexed import write_index

TOKENS, LENGTHS, DOCUMENTS, INDEX = 'tokens', 'lengths', 'documents', 'index'
TOKENIZER, TOKEN_NAMES, MANIFEST, PROGRESS, LOCK, NEW = (
    'tokenizer.json',
    'tokenizer_config.json',
    'manifest.json',
    'progress.json',
    'lock',
    'new',
)
# The final suffix of each file, in the order of the renames; TOKEN_NAMES is optional.
FINAL = {
    TOKENIZER: '.tokenizer.json',
    TOKEN_NAMES: '.tokenizer_config.json',
    MANIFEST: '.json',
    TOKENS: '.bin',
    INDEX: '.idx',
}
FIX = 'free disk space, or delete OUT.partial and choose another OUT'
NAMES = frozenset({LENGTHS, DOCUMENTS, PROGRESS, LOCK, NEW, *FINAL})


class UnfinishedError(ConfigError):
    """An error after which the folder is intact, so that the same command can resume the build."""


class Progress(BaseModel):
    """The progress of a build, from which it resumes."""

    model_config = ConfigDict(extra='forbid', strict=True)

    fingerprint: str  # hash of everything that determines the output
    complete: bool = False  # whether only renames are left to do
    position: Position = Position()  # position in the inputs to resume from
    itemsize: int = 0  # bytes per token id
    tokens: int = 0  # number of tokens written
    open_tokens: int = 0  # number of tokens written of the document that continues
    sequences: int = 0
    documents: int = 0
    max_token: int = 0  # largest token id
    text_bytes: int = 0  # bytes of text encoded
    spelling: int = 0  # number of documents that spell special tokens
    open_spells: bool = False  # whether the document that continues spells special tokens
    spelled: list[str] = []  # names of these tokens
    skipped: int = 0  # number of bad lines skipped
    skipped_places: list[str] = []  # file and line of the first skipped lines

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each growing file, in bytes."""
        return {
            TOKENS: self.tokens * self.itemsize,
            LENGTHS: 4 * self.sequences,
            DOCUMENTS: 8 * (1 + self.documents),
        }


def finals(out: Path) -> list[Path]:
    """Return the files of a complete build, in the order in which they appear."""
    return [Path(f'{out}{suffix}') for suffix in FINAL.values()]


def read_progress(out: Path) -> Progress | None:
    """Return the progress of the build to `out`; None if there is nothing to resume."""
    try:
        return Progress.model_validate_json((_folder(out) / PROGRESS).read_bytes())
    except (OSError, ValueError):
        return None


class Partial:
    """The locked folder OUT.partial.

    Disk errors are raised as UnfinishedErrors that name the file and its size.
    """

    def __init__(self, out: Path) -> None:
        self.folder = _folder(out)
        self._out = out
        self._files: dict[str, Any] = {}
        self._digest = sha256()

    @classmethod
    @contextmanager
    def lock(cls, out: Path) -> Iterator[Self]:
        """Create the folder if necessary, and hold its lock while the context is open.

        Raises ConfigError if another process has the lock, or if the folder has files that no build
        wrote.
        """
        partial = cls(out)
        with _errors(partial.folder):
            partial.folder.mkdir(parents=True, exist_ok=True)
            if strange := sorted({path.name for path in partial.folder.iterdir()} - NAMES):
                raise mistake(
                    partial.folder,
                    f'contains {strange[0]}, which no build wrote; '
                    'move the folder, or choose another OUT',
                )
            file = (partial.folder / LOCK).open('w')
        with file:
            try:
                lock(file.fileno(), partial.folder / LOCK)
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(partial.folder / LOCK)):
                    raise FileNotFoundError  # another build has just ended
            except OSError as error:
                raise mistake(
                    partial.folder,
                    'another build is writing here; wait for it, or choose another OUT',
                ) from error
            try:
                yield partial
            finally:
                partial.close()

    def start(self, progress: Progress) -> None:
        """Delete the files of an earlier build, and save `progress`."""
        for name in NAMES - {LOCK}:
            (self.folder / name).unlink(missing_ok=True)
        self.save(progress)

    def open(self, progress: Progress) -> None:
        """Open the growing files, truncated to the sizes of `progress`.

        Raises ConfigError if a file is shorter.
        """
        self._digest = sha256()
        for name, size in progress.sizes.items():
            path = self.folder / name
            with _errors(path):
                self._files[name] = file = open(path, 'ab+', buffering=0)  # noqa: SIM115
                if name == DOCUMENTS and not file.tell():
                    self.append(DOCUMENTS, np.zeros(1, '<i8'))
                if file.seek(0, os.SEEK_END) < size:
                    raise mistake(
                        path,
                        f'has {file.tell()} bytes instead of {size}; '
                        'run the same command again to start over',
                    )
                file.truncate(size)
        self._files[TOKENS].seek(0)
        while chunk := self._files[TOKENS].read(UNIT):
            self._digest.update(chunk)

    def append(self, name: str, array: np.ndarray) -> None:
        """Append an array to a growing file."""
        data = np.ascontiguousarray(array).data.cast('B') if array.size else memoryview(b'')
        with _errors(self.folder / name):
            rest = data  # a single write may be partial
            while rest:
                rest = rest[self._files[name].write(rest) :]
        if name == TOKENS:
            self._digest.update(data)

    def checkpoint(self, progress: Progress) -> None:
        """Flush the growing files and save `progress`, from which a killed build then resumes."""
        for name, file in self._files.items():
            with _errors(self.folder / name):
                os.fsync(file.fileno())
        self.save(progress)

    def save(self, progress: Progress) -> None:
        """Replace progress.json."""
        self.write(PROGRESS, progress.model_dump_json().encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file that appears under its name only when it is completely on disk."""
        with _errors(self.folder / NEW), (self.folder / NEW).open('wb', buffering=0) as file:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        os.replace(self.folder / NEW, self.folder / name)

    def write_index(self, dtype: np.dtype) -> None:
        """Write the index from the lengths and document boundaries."""
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
        """Return the SHA-256 of the token file."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the growing files."""
        while self._files:
            self._files.popitem()[1].close()

    def publish(self, resumable: bool) -> None:
        """Rename the files to their final names, PREFIX.idx last, and delete the folder.

        If a kill interrupts this, it can be repeated. Raises UnfinishedError if a file cannot be
        renamed. Unless the build is `resumable`, the error gives the commands that rename the rest.
        """
        for name, final in zip(FINAL, finals(self._out), strict=True):
            try:
                os.replace(self.folder / name, final)
                sync(final.parent)
            except FileNotFoundError:
                pass  # an earlier call renamed the file before it was killed
            except OSError as error:
                rest = 'the same command again' if resumable else f'`{self._renames()}`'
                message = (
                    f'cannot be renamed from {self.folder / name}: {error.strerror}; '
                    f'make the folder writable, and run {rest}'
                )
                raise UnfinishedError(Problem(str(final), message)) from error
        self.discard()

    def _renames(self) -> str:
        """Return the shell's commands that do the rest of `publish`."""
        renames = [
            f'mv {typed(self.folder / name)} {typed(final)}'
            for name, final in zip(FINAL, finals(self._out), strict=True)
            if (self.folder / name).exists()
        ]
        return ' && '.join([*renames, f'rm -r {typed(self.folder)}'])

    def discard(self) -> None:
        """Delete the folder."""
        self.close()
        # progress.json is deleted after the files that it describes
        for name in (
            *sorted(NAMES - {PROGRESS, LOCK}),
            PROGRESS,
            LOCK,
        ):
            (self.folder / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def _folder(out: Path) -> Path:
    return Path(f'{out}.partial')


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        held = f' after {path.stat().st_size} bytes' if path.is_file() else ''
        message = f'cannot be written{held}: {error.strerror}; {FIX}'
        raise UnfinishedError(Problem(str(path), message)) from error
