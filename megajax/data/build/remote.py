"""Corpus files that are named by URLs, such as s3://bucket/*.jsonl, opened by fsspec.

fsspec and the package for a protocol (s3fs, gcsfs, huggingface_hub, aiohttp) are imported when a
URL asks for them. Credentials are those that the package finds by itself.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar, cast

from megajax.config.errors import ConfigError, Problem, reason
from megajax.config.extras import install

BLOCK = 1 << 23  # bytes that are fetched at once, where a server has ranges
BUFFER = 1 << 20  # bytes that are read at once
# How filesystems name what changes with a file's content, the surest first.
VERSIONS = 'ETag', 'etag', 'md5Hash', 'blob_id', 'mtime', 'LastModified', 'last_modified', 'created'

Found = TypeVar('Found')


def is_remote(path: str) -> bool:
    """Whether the path is a URL, such as s3://bucket/key."""
    return re.match(r'[a-z][a-z0-9+.-]*://', path) is not None


def is_web(url: str) -> bool:
    """Whether the URL is of a web server, where a name may have a query and no ranges be served."""
    return url.startswith(('http://', 'https://'))


def expand(url: str) -> list[str]:
    """Return the URLs of the files that a URL with wildcards names, sorted; else the URL itself."""
    if not re.search(r'[*\[]' if is_web(url) else r'[*?\[]', url):
        return [url]
    files, path = _filesystem(url)
    names = _ask(url, lambda: files.glob(path, detail=True))
    return sorted(
        files.unstrip_protocol(name) for name, info in names.items() if info['type'] == 'file'
    )


def look(url: str) -> tuple[int | None, str]:
    """Return the bytes of a file, None if the server does not tell, and what tells its version.

    Raises ConfigError if there is no such file.
    """
    files, path = _filesystem(url)
    info = _ask(url, lambda: files.info(path))
    if info.get('type') == 'directory':
        raise _error(url, f"is a folder; give its files, for example '{url.rstrip('/')}/*.jsonl'")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), '')
    return info.get('size'), version


@contextmanager
def open_remote(url: str, size: int, *, at_any_place: bool = False) -> Iterator[BinaryIO]:
    """Open a file of `size` bytes, 0 if unknown; `at_any_place` needs a server that has ranges."""
    files, path = _filesystem(url)
    in_one_answer = is_web(url) and not at_any_place
    block = 0 if in_one_answer else BLOCK
    with _ask(url, lambda: files.open(path, 'rb', block_size=block)) as file:
        raw = _Raw(file, size, is_seekable=not in_one_answer)
        yield cast(BinaryIO, io.BufferedReader(raw, BUFFER))


class _Raw(io.RawIOBase):
    """A file of fsspec whose errors are OSErrors, and which raises EOFError if it ends early."""

    def __init__(self, file: Any, size: int, *, is_seekable: bool) -> None:
        self._file, self._size, self._is_seekable = file, size, is_seekable
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._is_seekable

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = int(self._file.seek(offset, whence))
        return self._at

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # each filesystem has errors of its own
            raise OSError(f'{reason(error)} at byte {self._at}') from error
        buffer[: len(data)] = data
        self._at += len(data)
        if not data and self._at < self._size:
            raise EOFError(f'it ends after {self._at} of {self._size} bytes')
        return len(data)


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL, and its path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise _error(url, f'needs fsspec, which is not installed; {install("remote")}') from error
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        needed = f'{reason(error).rstrip(".")}, beside {install("remote")}'
        raise _error(url, f'needs a package that is not installed; {needed}') from error
    except ValueError as error:
        raise _error(url, f'{reason(error)}; use s3://, gs://, hf:// or https://') from error
    return files, path


def _ask(url: str, question: Callable[[], Found]) -> Found:
    try:
        return question()
    except FileNotFoundError as error:
        raise _error(url, 'there is no such file; check the name, or give a glob') from error
    except Exception as error:  # each filesystem has errors of its own
        raise _error(
            url, f'cannot be read: {reason(error)}; check the name and the credentials'
        ) from error


def _error(url: str, message: str) -> ConfigError:
    return ConfigError(Problem(path=url, message=message))
