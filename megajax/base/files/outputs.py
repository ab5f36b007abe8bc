"""Check the output files of a command before it computes anything, and write files atomically."""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from megajax.base.errors import ConfigError
from megajax.base.files.exists import exists

NO_SPACE = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # only writing fails with these
NO_URL = 'give a path on this machine or on a shared file system, and copy the result there'


def check_outputs(*paths: Path | None) -> None:
    """Raise ConfigError with every file that cannot be written; None is skipped."""
    if problems := [*output_problems(*paths)]:
        raise ConfigError(*problems)


def output_problems(*paths: Path | None) -> Iterator[str]:
    """Yield a message for each file that cannot be written, or is given twice; None is skipped."""
    given = [*filter(None, paths)]
    for place, path in enumerate(given):
        if path.absolute() in [other.absolute() for other in given[:place]]:
            yield f'{path} would be written twice: give each output its own file'
        there = next(each for each in (path, *path.parents) if exists(each))
        if url := url_of(path):
            yield f'{url} is a URL: {NO_URL}'
        elif path.is_dir():
            yield f'{path} is a folder: give the name of a file in it'
        elif there != path and not there.is_dir():
            yield f'{path}: {there} is a file, not a folder: choose another file'
        elif not os.access(there, os.W_OK):
            yield f'{path} is not writable: change its permissions, or choose another file'


def url_of(path: Path) -> str | None:
    """Return the URL that this is the path of, or None if it is no URL.

    A system call would take s3://bucket/key for a file in a folder named `s3:`.
    """
    scheme, *rest = path.parts or ('',)
    is_url = rest and re.fullmatch(r'[A-Za-z][A-Za-z0-9+.-]*:', scheme)
    return f'{scheme}//{"/".join(rest)}' if is_url else None


def with_folder(path: Path) -> Path:
    """Create the folder of a file that is to be written, and return the path of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_output(path: Path, content: str | bytes) -> None:
    """Write the file that a command was asked for, text in UTF-8; create its folder.

    A link to a file stays a link. Raises ConfigError if the file cannot be written, for example
    because the disk is full; it is then as it was before.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        target = path.resolve() if path.is_file() else with_folder(path)
        if os.access(target.parent, os.W_OK):
            write_file(target, content)
        else:  # a file that exists can be written in a folder in which none can be created
            target.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be written: {error.strerror}; free some space, or choose another file'
        ) from error


@contextmanager
def writing(*outputs: tuple[Path | None, str]) -> Iterator[None]:
    """Write outputs of a command, those with a path, after the block has printed its result.

    A full disk then leaves the printed result, and a stdout that cannot be written, such as a
    closed pipe, leaves the files.
    """
    try:
        yield
    finally:
        for path, text in outputs:
            if path:
                write_output(path, text)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: it gets its name only when it is on the disk.

    A pipe, a terminal or another device is written to. Raises OSError if it cannot be written; a
    file of this name is then as it was before.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    new = path.with_name(f'{path.name}.new')
    try:
        with new.open('wb') as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise
    sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file of a cache, which several processes may write at once; create its folder.

    It gets its name only when it is complete. It is not flushed to disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix='.new-', delete=False) as file:
        new = Path(file.name)
    try:
        new.write_bytes(content)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk.

    Does nothing if the file system cannot flush folders.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)
