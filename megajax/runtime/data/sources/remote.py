"""Open corpus files by URL, such as s3://bucket/*.jsonl, with fsspec.

fsspec and the package for a protocol (s3fs, gcsfs, huggingface_hub, aiohttp) are imported when a
URL needs them. The package finds credentials by itself.
"""

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeGuard, TypeVar, cast

from megajax.base.errors import ConfigError, Problem, mistake, reason

BLOCK = 1 << 23  # number of bytes that are fetched at once, if the server supports ranges
BUFFER = 1 << 20  # number of bytes that are read at once
CONNECT, SILENCE = 30, 300  # seconds until a web server must have answered, and sent more
# The names that filesystems have for a value that changes with a file's content, the most reliable
# first.
HASHES = ('ETag', 'etag', 'md5Hash', 'blob_id')
VERSIONS = (
    *HASHES,
    *('mtime', 'LastModified', 'last_modified', 'Last-Modified', 'created'),
)
PACKAGES = {'s3': 's3fs', 'gs': 'gcsfs', 'gcs': 'gcsfs', 'hf': 'huggingface_hub'}
HEADERS = """'{"client_kwargs": {"headers": {"Authorization": "Bearer TOKEN"}}}'"""
# How a user provides credentials, by protocol.
CREDENTIALS = {
    's3': 'AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY',
    'gs': 'gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS',
    'gcs': 'gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS',
    'hf': 'HF_TOKEN, and the terms of a gated repository accepted on the Hub',
    'http': f'FSSPEC_HTTP={HEADERS}',
    'https': f'FSSPEC_HTTPS={HEADERS}',
}

Found = TypeVar('Found')
# The size of a file, or None if unknown, and a string that identifies its version.
Looked = tuple[int | None, str]


def is_remote(path: str) -> bool:
    """Whether the path is a URL, such as s3://bucket/key."""
    return re.match(r'[a-z][a-z0-9+.-]*://', path) is not None


def is_web(url: str) -> bool:
    """Whether the URL is on a web server, where names can have queries and ranges may not work."""
    return url.startswith(('http://', 'https://'))


def expand(url: str) -> dict[str, Looked | None]:
    """Return the URLs of the files that a URL with wildcards names, sorted, or the URL itself.

    Each comes with the answer of `look`, or with None if the server's list does not contain it.
    """
    if not re.search(r'[*\[]' if is_web(url) else r'[*?\[]', url):
        return {url: None}
    files, path = _filesystem(url)
    files.invalidate_cache()
    names = _ask(url, lambda: files.glob(path, detail=True))
    found = {
        files.unstrip_protocol(name): _looked(info) if any(map(info.get, HASHES)) else None
        for name, info in names.items()
        if info['type'] == 'file'
    }
    if not found:
        raise mistake(url, 'matches no file; check the pattern')
    return {each: found[each] for each in sorted(found)}


def names_below(url: str, found: Iterable[str]) -> dict[str, str]:
    """Return the URLs that `expand` has found by their names below the URL's fixed part."""
    files, path = _filesystem(url)
    root = re.split(r'[*?\[]', path)[0].rpartition('/')[0]
    return {files._strip_protocol(each).removeprefix(root).lstrip('/'): each for each in found}


def look(url: str) -> Looked:
    """Return the size of a file, or None if unknown, and a string that identifies its version.

    Raises MissingError if there is no such file, and RefusedError if the server denies access.
    """
    files, path = _filesystem(url)
    files.invalidate_cache(path)
    info = _ask(url, lambda: files.info(path))
    if info.get('type') == 'directory':
        raise mistake(url, f"is a folder; give its files, for example '{url.rstrip('/')}/*.jsonl'")
    return _looked(info)


def _looked(info: Mapping[str, Any]) -> Looked:
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), '')
    return info.get('size'), version


def fetch(url: str, start: int, stop: int) -> bytes:
    """Return bytes `start` up to `stop` of a file, in one request.

    Raises ConfigError if the server denies access or ignores ranges, and OSError if the response is
    cut off or the server cannot be reached.
    """
    files, path = _filesystem(url)
    try:
        data: bytes = files.cat_file(path, start=start, end=stop)
    except Exception as error:  # each filesystem has errors of its own
        if _is_refusal(error) or isinstance(error, FileNotFoundError):
            raise _unreadable(url, error) from error
        raise OSError(reason(error)) from error
    if len(data) > stop - start:
        raise mistake(url, 'is on a server that ignores range requests; copy it to another one')
    if len(data) < stop - start:
        raise OSError(f'the response ends after {len(data)} of {stop - start} bytes')
    return data


@contextmanager
def open_remote(url: str, size: int, *, at_any_place: bool = False) -> Iterator[BinaryIO]:
    """Open a file of `size` bytes, 0 if unknown.

    To seek, set `at_any_place`; the server must then support ranges.
    """
    files, path = _filesystem(url)
    in_one_answer = is_web(url) and not at_any_place
    options = _of_one_answer(files) if in_one_answer else {'block_size': BLOCK}
    with _ask(url, lambda: files.open(path, 'rb', **options)) as file:
        raw = _Raw(file, url, size, is_seekable=not in_one_answer)
        yield cast(BinaryIO, io.BufferedReader(raw, BUFFER))


def _of_one_answer(files: Any) -> dict[str, Any]:
    """Return the options to read a file of a web server in a single response.

    By default, aiohttp ends a response after 5 minutes, although a large file takes longer.
    """
    # Any size, because fsspec would otherwise pass the timeout to its own request for the size.
    options: dict[str, Any] = {'block_size': 0, 'size': -1}
    if 'timeout' not in files.kwargs:  # FSSPEC_HTTPS may set one
        from aiohttp import ClientTimeout

        options['timeout'] = ClientTimeout(total=None, sock_connect=CONNECT, sock_read=SILENCE)
    return options


class CutOffError(OSError):
    """An error in the middle of a response, which may be transient."""


class _Raw(io.RawIOBase):
    """A file of fsspec that raises CutOffError after an error, and if it ends early.

    If a server denies access to the content, a RefusedError is raised; a gated repository still
    shows names and sizes.
    """

    def __init__(self, file: Any, url: str, size: int, *, is_seekable: bool) -> None:
        self._file, self._url, self._size, self._is_seekable = file, url, size, is_seekable
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
            if _is_refusal(error):
                raise RefusedError(*_unreadable(self._url, error).problems) from error
            raise CutOffError(f'{reason(error)} at byte {self._at}') from error
        buffer[: len(data)] = data
        self._at += len(data)
        if not data and self._at < self._size:
            raise CutOffError(f'it ends after {self._at} of {self._size} bytes')
        return len(data)


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL, and its path there."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        from megajax.core.config.extras import install

        raise mistake(url, f'needs fsspec, which is not installed; {install("remote")}') from error
    for logger in ('gcsfs', 'google.auth'):  # they log a traceback of what gcsfs raises
        _quieten(logger)
    try:
        files, path = url_to_fs(url)
    except ImportError as error:
        from megajax.core.config.extras import install

        if package := PACKAGES.get(_protocol(url)):
            fix = f'{package}, which is not installed; pip install {package}'
        else:
            fix = f'a package that is not installed; {reason(error).rstrip(".")}'
        raise mistake(url, f'needs {fix} (in addition to {install("remote")})') from error
    except ValueError as error:
        raise mistake(url, f'{reason(error)}; use s3://, gs://, hf:// or https://') from error
    return files, path


def _quieten(package: str) -> None:
    """Turn off the log of a package, unless the user has set its level (GCSFS_DEBUG)."""
    logger = logging.getLogger(package)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)


class MissingError(ConfigError):
    """An error that means: as far as the server says, there is no file of that name."""


class RefusedError(ConfigError):
    """An error that means: the server denies access to a file of that name.

    A server may answer so for a file that does not exist: S3 does if the credentials cannot list
    the bucket.
    """


class UnansweredError(ConfigError):
    """An error that may be transient, such as an error of the network or of a disk."""


def _ask(url: str, question: Callable[[], Found]) -> Found:
    try:
        return question()
    except FileNotFoundError as error:
        fix = 'check the name, or give a glob'
        if _protocol(url) == 'hf':  # the Hub hides private repositories
            fix = 'check repository, revision and name; a private one needs HF_TOKEN'
        elif isinstance(cause := error.__cause__, Exception) and _is_refusal(cause):
            # for https, fsspec reports denied access as a missing file
            raise RefusedError(*_unreadable(url, cause).problems) from error
        elif is_web(url) and _may_pass(cause):
            raise UnansweredError(*_unreadable(url, cause).problems) from error
        problem = Problem(url, f'there is no such file; {fix}')
        raise MissingError(problem) from error
    except Exception as error:  # each filesystem has errors of its own
        kind = RefusedError if _is_refusal(error) else UnansweredError
        raise kind(*_unreadable(url, error).problems) from error


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that there are no credentials, or that a server has answered 401 or
    403.

    s3fs, gcsfs, huggingface_hub and aiohttp report this in different ways.
    """
    codes = (
        getattr(error, 'status', None) or getattr(error, 'code', None),  # aiohttp deprecates `code`
        getattr(getattr(error, 'response', None), 'status_code', None),
    )
    return (
        isinstance(error, PermissionError)
        or type(error).__name__.endswith('CredentialsError')  # an error of botocore or google.auth
        or str(error).startswith('Forbidden: ')
        or any(code in (401, 403) for code in codes)
    )


def _may_pass(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether an error may be transient.

    fsspec reports any error of a web server as a missing file; only status 404 means that there is
    no file.
    """
    is_missing = isinstance(error, FileNotFoundError) or getattr(error, 'status', None) == 404
    return isinstance(error, Exception) and not is_missing


def _unreadable(url: str, error: Exception) -> ConfigError:
    credentials = CREDENTIALS.get(_protocol(url))
    fix = f'the credentials ({credentials})' if credentials else 'the credentials'
    return mistake(url, f'cannot be read: {reason(error)}; check the name and {fix}')


def _protocol(url: str) -> str:
    return url.partition('://')[0]
