"""Find the files of a corpus: a file, a folder or the standard library."""

import logging
import mimetypes
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megajax.base.errors import ConfigError, mistake
from megajax.base.files.exists import exists, is_file
from megajax.base.render.text import typed
from megajax.core.config.overrides import typed_override
from megajax.runtime.data.sources.contents import json_text
from megajax.runtime.data.sources.inputs import (
    Format,
    Input,
    cards_among,
    find_inputs,
    format_of,
    is_table,
)
from megajax.runtime.data.sources.pieces import Position
from megajax.runtime.data.sources.read import HEAD, read_pieces
from megajax.runtime.data.sources.remote import is_remote
from megajax.runtime.data.tokens.indexed import is_index, prefixes_among

NOT_STDLIB = frozenset(
    {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
)
KINDS = (
    'a text file, JSON lines (.jsonl, .json, .ndjson), Parquet, a folder of these, '
    "the prefix of token files (.bin and .idx), or 'stdlib'"
)
MOST_NAMES = 3  # maximum number of unread files that a message names

logger = logging.getLogger(__name__)


class CorpusFile(NamedTuple):
    """A file of a corpus, and its name in the corpus, with forward slashes."""

    path: Path
    name: str
    format: Format
    alone: bool = False  # whether the corpus is this file, or contains only tables


class Corpus(NamedTuple):
    """The files that contain the documents of a corpus, and the other files of its folder."""

    files: list[CorpusFile]
    unread: list[str]  # names of files that are not read

    def log_unread(self, corpus: str) -> None:
        """Log the files of a folder that are not read, except images."""
        kinds = ((name, mimetypes.guess_type(name)[0] or '') for name in sorted(self.unread))
        if names := [name for name, kind in kinds if not kind.startswith('image/')]:
            logger.warning(
                'data.corpus: %s: reading %s, but not %s',
                corpus,
                _few([file.name for file in self.files]),
                _few(names),
            )


def find_corpus(corpus: str) -> Corpus:
    """Return the files of a corpus, which is 'stdlib', a file or a folder.

    The documents of a folder are its JSON lines and Parquet files. If there are none, they are its
    text files, except hidden files and a README.md about the data. Raises ConfigError if there is
    no such file, if a folder cannot be read, or if the text files are next to token files.
    """
    if is_remote(corpus):
        raise mistake(
            'data.corpus',
            f'{corpus} is a URL, which only training reads: run megajax data build OUT --input '
            f'{typed(corpus)}, and set data.corpus=OUT',
        )
    if corpus == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        modules = (path for path in _walk(root, NOT_STDLIB, links=False) if path.suffix == '.py')
        return Corpus([_file(path, root) for path in modules if is_file(path)], [])
    root = Path(corpus).expanduser()
    if not exists(root, 'data.corpus'):
        raise mistake('data.corpus', f'no such file or folder: {root}{_near(root)}; give {KINDS}')
    if is_file(root, 'data.corpus'):
        return Corpus([_file(root, root.parent)._replace(alone=True)], [])
    paths = sorted(_walk(root))
    files = [_in_folder(path, root) for path in paths if is_file(path, 'data.corpus')]
    names, alone = documents_among({file.name: file.format for file in files})
    documents = [file._replace(alone=alone) for file in files if file.name in names]
    if all(file.format == 'text' for file in documents):
        prefixes = prefixes_among(set(map(str, paths)))
        check_no_tokens(corpus, [prefix for prefix in prefixes if is_index(f'{prefix}.idx')])
    others = {path.relative_to(root).as_posix() for path in paths} - names
    return Corpus(documents, sorted(others))


def check_no_tokens(corpus: str, prefixes: Sequence[str]) -> None:
    """Raise ConfigError if a folder or glob of texts contains the token files of `prefixes`.

    Their manifest and tokenizer would be read as texts.
    """
    if prefixes:
        few = _few([f'{prefix}.idx' for prefix in prefixes])
        prefix = 'their prefix' if len(prefixes) == 1 else 'one of their prefixes'
        blend = ', mix them with data.blend' if len(prefixes) > 1 else ''
        override = typed_override('data.corpus', prefixes[0])
        fix = (
            f'give {prefix}, {override}{blend}, or move them elsewhere '
            '(a run that read them as texts then needs run.allow_changed_data=true)'
        )
        raise mistake('data.corpus', f'{corpus} contains token files ({few}); {fix}')


def documents_among(formats: Mapping[str, Format]) -> tuple[set[str], bool]:
    """Return the names of the documents of a folder, and whether all are tables or settings.

    `formats` has the format of each file by its name. Documents are JSON lines and Parquet files;
    if there are none, text files.
    """
    if documents := {name for name, format in formats.items() if format != 'text'}:
        return documents, False
    documents = formats.keys() - cards_among(list(formats))
    return documents, all(
        is_table(name) or PurePosixPath(name).suffix == '.json' for name in documents
    )


def input_of(file: CorpusFile) -> Input:
    """Return a file of a corpus as the reader takes it."""
    (input,) = find_inputs([str(file.path)], file.format)
    # The contents of a file that was found in a folder are checked; a folder of text may contain
    # tables.
    return replace(input, given=False, table=input.table and file.alone)


def _in_folder(path: Path, root: Path) -> CorpusFile:
    file = _file(path, root)
    if file.format != 'jsonl':
        return file
    (input,) = find_inputs([str(path)], file.format)
    return file._replace(format=format_in_folder(input, file.name))


def format_in_folder(input: Input, name: str) -> Format:
    """Return the format of a file of a folder; a .json file without documents counts as text.

    Such a file contains the settings of a program.
    """
    if input.format != 'jsonl' or '.json' not in map(str.lower, PurePosixPath(name).suffixes[-2:]):
        return input.format
    with suppress(ConfigError):  # the error is raised again when the file is read
        as_text = replace(input, format='text', given=True)
        piece, _ = next(read_pieces([as_text], '', Position(), HEAD))
        assert isinstance(piece.data, bytes)
        found = json_text(piece.data, whole=piece.last)
        return 'jsonl' if found and found.is_documents else 'text'
    return 'text'


def _file(path: Path, root: Path) -> CorpusFile:
    return CorpusFile(path, path.relative_to(root).as_posix(), format_of(path.name))


def _walk(root: Path, skip: frozenset[str] = frozenset(), *, links: bool = True) -> Iterator[Path]:
    """Yield what is in a folder and its subfolders, except hidden names.

    Linked folders are read too, unless not `links`, but no folder is read twice. Raises ConfigError
    if a folder cannot be read.
    """
    waiting, seen = [str(root)], set[str]()
    while waiting:
        linked = list[str]()  # read after all others, so that a folder has its own name if possible
        for folder, folders, names in os.walk(waiting.pop(0), onerror=_unreadable):
            if (real := os.path.realpath(folder)) in seen:
                folders[:] = []
                continue
            seen.add(real)
            folders[:] = [name for name in folders if name not in skip and not name.startswith('.')]
            paths = (os.path.join(folder, name) for name in folders)
            linked += filter(os.path.islink, paths) if links else ()
            yield from (Path(folder, name) for name in names if not name.startswith('.'))
        waiting += sorted(linked)


def _unreadable(error: OSError) -> None:
    fix = 'make it readable, or move it out of the corpus'
    raise mistake(
        'data.corpus', f'{error.filename} cannot be read: {error.strerror}; {fix}'
    ) from error


def _few(names: Sequence[str]) -> str:
    more = f' and {len(names) - MOST_NAMES:,} more' if len(names) > MOST_NAMES else ''
    return ', '.join(names[:MOST_NAMES]) + more


def _near(path: Path) -> str:
    """Return the working directory for a relative path, and similar names there."""
    names: set[str] = set()
    with suppress(OSError):
        names = {name.name for name in path.parent.iterdir()}
    names |= {name.removesuffix('.idx') for name in names if name.endswith('.idx')}
    near = [str(path.with_name(name)) for name in get_close_matches(path.name, names, MOST_NAMES)]
    here = '' if path.is_absolute() else f' in {Path.cwd()}'
    return here + f' (similar names: {", ".join(near)})' * bool(near)
