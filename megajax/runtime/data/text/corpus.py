"""Find the files of a corpus and its text documents, and split them into parts."""

import logging
import mimetypes
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from megajax.base.errors import ConfigError, Problem, problems_at
from megajax.base.render.text import typed
from megajax.runtime.data.sources.contents import NoTextError, json_text
from megajax.runtime.data.sources.inputs import (
    Format,
    Input,
    cards_among,
    find_inputs,
    format_of,
    is_table,
)
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.sources.parse import Fixes, parse
from megajax.runtime.data.sources.pieces import Position
from megajax.runtime.data.sources.read import HEAD, read_pieces
from megajax.runtime.data.sources.remote import is_remote
from megajax.runtime.data.sources.shapes import as_messages
from megajax.runtime.data.text.embedding_rows import NoRowError

NOT_STDLIB = frozenset(
    {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
)
KINDS = (
    'a text file, JSON lines (.jsonl, .json, .ndjson), Parquet, a folder of these, '
    "the prefix of token files (.bin and .idx), or 'stdlib'"
)
FIXES = Fixes(
    bad='fix it, or use megajax data build, which can skip such lines',
    no_key='name the text "text", or build token files with megajax data build --json-key KEY',
    messages='put lines with "messages" into a file of their own',
)
MOST_NAMES = 3  # maximum number of unread files that a message names

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and its name, which does not depend on the location of the corpus."""

    name: str  # path inside the corpus, with forward slashes
    text: str


Parts = tuple[list[Document], list[Document], list[Document]]  # training, validation, test


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
    no such file.
    """
    if is_remote(corpus):
        raise _error(
            f'{corpus} is a URL, which only training reads: run megajax data build OUT --input '
            f'{typed(corpus)}, and set data.corpus=OUT'
        )
    if corpus == 'stdlib':
        root = Path(sysconfig.get_path('stdlib'))
        files = [_file(path, root) for path in _walk(root, NOT_STDLIB) if path.suffix == '.py']
        return Corpus(files, [])
    root = Path(corpus).expanduser()
    if not root.exists():
        raise _error(f'no such file or folder: {root}{_near(root)}; give {KINDS}')
    if root.is_file():
        return Corpus([_file(root, root.parent)._replace(alone=True)], [])
    files = sorted(_in_folder(path, root) for path in _walk(root))
    cards = cards_among([file.name for file in files])
    documents = [file for file in files if file.format != 'text']
    if not documents:
        documents = [file for file in files if file.name not in cards]
        if all(is_table(file.name) or file.path.suffix == '.json' for file in documents):
            documents = [file._replace(alone=True) for file in documents]
    read = {file.name for file in documents}
    return Corpus(documents, [file.name for file in files if file.name not in read])


def read_documents(corpus: str) -> list[Document]:
    """Return the text documents of `find_corpus`, sorted by name.

    A text file is one document, and so is each line of JSON lines or row of Parquet, with its text
    under the key 'text'. In a folder of text, binary files and empty files are left out. Raises
    ConfigError if no text remains, or if a text cannot be read.
    """
    files, unread = find_corpus(corpus)
    is_folder = corpus == 'stdlib' or Path(corpus).expanduser().is_dir()
    documents: list[Document] = []
    for file in files:
        try:
            documents += _text(file) if file.format == 'text' else _lines(file)
        except NoTextError:
            if not is_folder:
                raise
            unread.append(file.name)
    if not any(document.text for document in documents):
        raise _error(f'{corpus!r} contains no text; give {KINDS}')
    Corpus([file for file in files if file.name not in unread], unread).log_unread(corpus)
    return sorted(documents, key=lambda document: document.name)


@contextmanager
def naming_lines(documents: Sequence[Document]) -> Iterator[None]:
    """Add the place of a text to the error for a token outside the vocabulary.

    The place is a line of a text file, or a document of JSON lines.
    """
    try:
        yield
    except NoRowError as error:
        for document in documents:
            before, token, _ = document.text.partition(error.token)
            if token:
                file, _, number = document.name.rpartition(':')
                is_line = bool(file) and number.isdecimal()
                line = before.count('\n') + 1
                with problems_at(
                    f'{file}: document {int(number) + 1}' if is_line else f'{document.name}:{line}'
                ):
                    raise
        raise


def read_text(path: str | Path, key: str = 'text') -> str:
    """Return a text file without a byte order mark; raise ConfigError if it is not text.

    `key` is where a line of JSON lines would have its text.
    """
    return ''.join(_texts(CorpusFile(Path(path).expanduser(), '', 'text', True), key))


def split_documents(documents: Sequence[Document], split: str) -> Parts:
    """Split documents into training, validation and test parts by weights, for example '95,5,0'.

    The hash of a document's name decides, so a document stays in its part when other documents are
    added, and the first documents of a part are a fair sample of the part. A part with a positive
    weight is never empty: it gets the document whose hash is nearest. A single document is cut into
    consecutive texts. Raises ConfigError if there are fewer documents than parts.
    """
    weights = [float(weight) for weight in split.split(',')]
    ends = [end / sum(weights) for end in accumulate(weights)]
    if len(documents) == 1:
        return _cut(documents[0], ends)
    if len(documents) < sum(weight > 0 for weight in weights):
        message = (
            f'{split!r} asks for more parts than there are documents ({len(documents)}); '
            "use '95,5,0', or a larger data.corpus"
        )
        raise ConfigError(Problem(path='data.split', message=message, others=('data.corpus',)))
    parts: Parts = ([], [], [])
    for document in sorted(documents, key=_hash):
        parts[bisect_right(ends, _hash(document))].append(document)
    for i, weight in enumerate(weights):
        if weight and not parts[i]:
            giver = max(range(3), key=lambda j: len(parts[j]))
            parts[i].append(parts[giver].pop(-1 if giver < i else 0))
    return parts


def copies_warning(train: Iterable[Hashable], validation: Sequence[Hashable]) -> str:
    """Return a warning with the number of validation documents that are copies; '' for none."""
    known = set(train)
    copies = sum(document in known for document in validation)
    message = (
        f'data.corpus: {copies:,} of {len(validation):,} documents to validate on are copies of '
        'documents to train on, which makes the validation loss too low; remove copies from the '
        'corpus'
    )
    return message if copies else ''


def _cut(document: Document, ends: Sequence[float]) -> Parts:
    parts: Parts = ([], [], [])
    start = 0
    for part, end in zip(parts, ends, strict=True):
        stop = round(end * len(document.text))
        if start < stop:
            part.append(
                Document(name=f'{document.name}[{start}:{stop}]', text=document.text[start:stop])
            )
        start = stop
    return parts


def _hash(document: Document) -> float:
    digest = sha256(document.name.encode(errors='surrogateescape')).digest()
    # 48 bits are exact in a float, so the quotient is below 1
    return int.from_bytes(digest[:6], 'big') / 2**48


def _text(file: CorpusFile) -> list[Document]:
    """Return the file as a document, or nothing if it is empty."""
    texts = list(_texts(file))
    return [Document(name=file.name, text=text) for text in [''.join(texts)] if text]


def _lines(file: CorpusFile) -> Iterator[Document]:
    """Yield each line or row as a document; names sort in the order of the lines."""
    place, first = next(read_objects(file.path), ('', {'text': ''}))
    if not {'text', 'messages'} & first.keys():
        keys = ', '.join(map(str, first)) or 'none'
        fix = as_messages(first) or FIXES.no_key
        raise ConfigError(
            Problem(
                path=place,
                message=f'has neither "text" nor "messages" (its keys: {keys}); {fix}',
            )
        )
    for number, text in enumerate(_texts(file)):
        yield Document(name=f'{file.name}:{number:012}', text=text)


def _texts(file: CorpusFile, key: str = 'text') -> Iterator[str]:
    for piece, _ in read_pieces([_input(file)], key, Position()):
        for text in parse(piece, key, FIXES):
            if isinstance(text, Problem):
                raise ConfigError(text)
            yield text


def _in_folder(path: Path, root: Path) -> CorpusFile:
    """Return a file of a folder; a .json file without documents (settings) counts as text."""
    file = _file(path, root)
    if file.format == 'jsonl' and '.json' in map(str.lower, path.suffixes[-2:]):
        as_text = file._replace(format='text')
        with suppress(ConfigError):  # the error is raised again when the file is read
            piece, _ = next(read_pieces(find_inputs([str(path)], 'text'), '', Position(), HEAD))
            assert isinstance(piece.data, bytes)
            found = json_text(piece.data, whole=piece.last)
            return file if found and found.is_documents else as_text
        return as_text
    return file


def _input(file: CorpusFile) -> Input:
    (input,) = find_inputs([str(file.path)], file.format)
    # The contents of a file that was found in a folder are checked; a folder of text may contain
    # tables.
    return replace(input, given=False, table=input.table and file.alone)


def _file(path: Path, root: Path) -> CorpusFile:
    return CorpusFile(path, path.relative_to(root).as_posix(), format_of(path.name))


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith('.')]
        paths = (Path(folder, name) for name in names if not name.startswith('.'))
        yield from (path for path in paths if path.is_file())  # skips broken links and pipes


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


def _error(message: str) -> ConfigError:
    return ConfigError(Problem(path='data.corpus', message=message))
