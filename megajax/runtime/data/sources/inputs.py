"""The corpus files of a build: the paths, URLs, globs and streams that `--input` names."""

import glob
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megajax.base.errors import ConfigError, Problem, mistake
from megajax.base.files.exists import exists
from megajax.base.render.text import typed
from megajax.runtime.data.sources import remote

STDIN = '-'
LOOKS = 16  # number of threads that ask for the size and the version of remote files

logger = logging.getLogger(__name__)

Format = Literal['jsonl', 'text', 'parquet']
SUFFIXES: dict[str, Format] = {
    '.jsonl': 'jsonl',
    '.json': 'jsonl',
    '.ndjson': 'jsonl',
    '.parquet': 'parquet',
}
TABLES = ('.csv', '.tsv')
COMPRESSED = ('.gz', '.zst', '.bz2', '.xz')


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file of the corpus. A stream has size 0 and can be read only once."""

    path: str
    format: Format
    size: int  # number of bytes on disk
    mtime_ns: int
    stream: bool
    version: str = ''  # version of a file with a URL: its ETag, or the time of its last change
    # whether the user gave the format, so that it does not come from the suffix
    given: bool = False
    # whether the user named this CSV or TSV file, rather than a folder or glob that contains it
    table: bool = False
    # Opens the file through a cache, for reading at any place; None: it is opened by its path.
    cached: Callable[[], BinaryIO] | None = None

    @property
    def compression(self) -> str:
        """The suffix of a compressed file, for example '.gz', or ''."""
        return compression_of(self.path)

    @property
    def is_remote(self) -> bool:
        """Whether the file is opened by its URL."""
        return remote.is_remote(self.path)


def find_inputs(patterns: Sequence[str], format: Format | None) -> list[Input]:
    """Return the files that paths, URLs, globs and '-' name, in order; a glob's matches are sorted.

    If `format` is None, the suffix of each file decides (`format_of`). Raises ConfigError with
    every file that does not exist, cannot be read, has a format that cannot be read in this way, or
    is named twice.
    """
    problems: list[Problem] = []
    inputs = list[Input]()
    named: dict[str, str] = {}  # the pattern of each file
    looks = list[tuple[Iterator[Input], bool]]()  # of each pattern, and whether all are tables
    threads = ThreadPoolExecutor(LOOKS)
    try:
        for pattern in patterns:
            with _adding_to(problems):
                found = _expand(pattern)
                paths = _without_card(pattern, list(found))
                problems += _named_before(pattern, paths, named)
                looked = threads.map(_look, paths, repeat(format), map(found.get, paths))
                looks.append((looked, all(map(is_table, paths))))
        for looked, table in looks:
            with _adding_to(problems):
                inputs += [replace(input, table=table) for input in looked]
    finally:
        threads.shutdown(cancel_futures=True)
    if not patterns:
        problems = [
            Problem('--input', "names no file; give paths, globs, or '-' for standard input")
        ]
    if problems:
        raise ConfigError(*problems)
    if cards := cards_among([input.path for input in inputs]):  # the shell may have named it
        message = '%s: reading it as a document; leave it out if it describes the other files'
        logger.warning(message, min(cards))
    return inputs


@contextmanager
def _adding_to(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += [problem for problem in error.problems if isinstance(problem, Problem)]


def _expand(pattern: str) -> dict[str, remote.Looked | None]:
    """Return the files of a pattern, each with what a server has already said about it."""
    if remote.is_remote(pattern):
        return remote.expand(pattern)
    path = str(Path(pattern).expanduser())
    if pattern == STDIN or exists(path):
        return {path: None}
    if not glob.has_magic(path):
        raise mistake(path, 'there is no such file; check the name, or give a glob in quotes')
    _check_folders(path)
    names = sorted(name for name in glob.glob(path, recursive=True) if not os.path.isdir(name))
    if not names:
        raise mistake(path, "matches no file; check the pattern ('**' descends into folders)")
    return dict.fromkeys(_once(pattern, names))


def _check_folders(pattern: str) -> None:
    """Raise ConfigError if a glob searches a folder that cannot be read, which `glob` skips."""
    parts = Path(pattern).parts
    for number, part in enumerate(parts):
        if not glob.has_magic(os.path.join(*parts[: number + 1])):
            continue
        searched = os.path.join('', *parts[:number], '**' if part == '**' else '', '')
        found = glob.glob(searched, recursive=True) if searched else [os.curdir]
        for folder in sorted(set(map(os.path.realpath, found))):
            try:
                # Opens only if the names in the folder can be opened, too.
                os.scandir(os.path.join(folder, os.curdir)).close()
            except OSError as error:
                fix = 'make it readable, or give a glob without it'
                raise mistake(folder, f'cannot be read: {error.strerror}; {fix}') from error


def cards_among(names: Sequence[str]) -> set[str]:
    """Return the names of README.md files, which describe other data, unless all are Markdown."""
    cards = {name for name in names if Path(name).name.lower() == 'readme.md'}
    others = [_suffix(name) for name in names if name not in cards]
    return cards if others and '.md' not in others else set()


def _without_card(pattern: str, paths: list[str]) -> list[str]:
    if cards := cards_among(paths):
        logger.warning('%s: not reading %s, which describes the data', pattern, min(cards))
    return [path for path in paths if path not in cards]


def _named_before(pattern: str, paths: Sequence[str], named: dict[str, str]) -> list[Problem]:
    """Return a problem if files are already among those `named`; otherwise add them."""
    twice = [path for path in paths if _identity(path) in named]
    problems = []
    if twice:
        more = f', and so would {len(twice) - 1:,} others' if len(twice) > 1 else ''
        message = (
            f'would be read twice{more}: --input {named[_identity(twice[0])]} and --input '
            f'{pattern} both name it; name it once, or build it apart and weight it by data.blend'
        )
        problems = [Problem(twice[0], message)]
    named.update({_identity(path): pattern for path in paths})
    return problems


def _identity(path: str) -> str:
    """Return the same text for all names of a file."""
    if path == STDIN or remote.is_remote(path):
        return path.replace('gcs://', 'gs://', 1)
    return os.path.realpath(path)


def _once(pattern: str, names: list[str]) -> list[str]:
    """Return the names without links to files that are also listed; a loop ends after 40 links."""
    files = dict[str, str]()
    for name in sorted(names, key=lambda name: (name.count(os.sep), name)):
        files.setdefault(os.path.realpath(name), name)
    if left := len(names) - len(files):
        logger.warning('%s: %d of %d matches are links to others', pattern, left, len(names))
    return sorted(files.values())


def _look(path: str, format: Format | None, looked: remote.Looked | None) -> Input:
    if path == STDIN:
        input = Input(path=path, format=format or 'jsonl', size=0, mtime_ns=0, stream=True)
    elif remote.is_remote(path):
        size, version = looked or remote.look(path)
        input = Input(
            path=path,
            format=format or format_of(path),
            size=size or 0,
            mtime_ns=0,
            stream=size is None,
            version=version,
            given=format is not None,
        )
    else:
        try:
            status = os.stat(path)
            if stat.S_ISREG(status.st_mode):
                Path(path).open('rb').close()
        except OSError as error:
            raise mistake(
                path, f'cannot be read: {error.strerror}; make it readable, or leave it out'
            ) from error
        if stat.S_ISDIR(status.st_mode):
            raise mistake(
                path,
                f'is a folder; give its files, for example {typed(path.rstrip("/") + "/*.jsonl")}',
            )
        stream = not stat.S_ISREG(status.st_mode)
        size, mtime_ns = (0, 0) if stream else (status.st_size, status.st_mtime_ns)
        input = Input(
            path=path,
            format=format or format_of(path),
            size=size,
            mtime_ns=mtime_ns,
            stream=stream,
            given=format is not None,
        )
    return readable(input)


def readable(input: Input) -> Input:
    """Return the input.

    Raises ConfigError if its format cannot be read, or needs a package that is not installed.
    """
    if input.format == 'parquet' and (input.stream or input.compression):
        raise mistake(
            input.path,
            'Parquet is read only from uncompressed files, not streams; write it to such a file',
        )
    if input.compression == '.zst':
        optional('zstandard', input.path)
    elif input.format == 'parquet':
        optional('pyarrow', input.path)
    return input


def name_of(path: str) -> str:
    """Return a path, or a URL without a query that does not name the file."""
    return without_query(path) if remote.is_web(path) else path


def without_query(address: str) -> str:
    """Return an address on a web server, or its end, without a query such as ?download=true.

    A query stays if only the query has a suffix, as in get?file=a.jsonl.gz.
    """
    path = address.partition('?')[0]
    is_in_query = not Path(path.rpartition('/')[2]).suffix and Path(address).suffix
    return address if is_in_query else path


def compression_of(path: str) -> str:
    """Return the suffix of a compressed file or URL, for example '.gz', or ''."""
    suffix = Path(name_of(path)).suffix.lower()
    return suffix if suffix in COMPRESSED else ''


def format_of(path: str) -> Format:
    """Return the format of a file or URL by its name."""
    return SUFFIXES.get(_suffix(path), 'text')


def is_table(path: str) -> bool:
    """Whether a file or URL is CSV or TSV by its name; these are not read as text."""
    return _suffix(path) in TABLES


def _suffix(path: str) -> str:
    """Return the suffix of a file or URL without its compression, in small letters."""
    name = Path(name_of(path).lower())
    return (name.with_suffix('') if name.suffix in COMPRESSED else name).suffix


def unreadable(input: Input, error: Exception) -> ConfigError:
    """Return the ConfigError for a file that ends early or cannot be read to its end.

    It is an UnansweredError if the response of a server was cut off, or if the operating system
    could not read the file.
    """
    reason = getattr(error, 'strerror', None) or str(error).splitlines()[0].rstrip('. ')
    message = f'cannot be read to its end: {reason}'
    if isinstance(error, remote.CutOffError):
        return remote.UnansweredError(Problem(input.path, f'{message}; check the network'))
    if getattr(error, 'errno', None):  # the file itself may be intact
        fix = 'check the disk and the permissions, or leave it out'
        return remote.UnansweredError(Problem(input.path, f'{message}; {fix}'))
    return mistake(input.path, f'{message}; copy it again, or leave it out')


def optional(module: str, path: str) -> Any:
    """Return the module.

    Raises ConfigError, with the file that needs the module, if it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        # Here, so that a worker of a build starts without the config.
        from megajax.core.config.extras import install

        raise mistake(
            path, f'needs {error.name}, which is not installed; {install("data")}'
        ) from error
