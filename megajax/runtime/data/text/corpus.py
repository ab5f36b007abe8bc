"""Read the text documents of a corpus, and split them into parts."""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

import numpy as np

from megajax.base.errors import ConfigError, Problem, mistake, problems_at
from megajax.base.files.exists import is_folder
from megajax.runtime.data.sources.contents import NoTextError
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.sources.parse import Fixes, parse
from megajax.runtime.data.sources.pieces import Position
from megajax.runtime.data.sources.read import read_pieces
from megajax.runtime.data.sources.shapes import as_messages
from megajax.runtime.data.text.embedding_rows import NoRowError
from megajax.runtime.data.text.files import (
    KINDS,
    Corpus,
    CorpusFile,
    find_corpus,
    input_of,
)

FIXES = Fixes(
    bad='fix it, or use megajax data build, which can skip such lines',
    no_key='name the text "text", or build token files with megajax data build --json-key KEY',
    messages='put lines with "messages" into a file of their own',
    images='use a model with a vision section, or remove the images',
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and its name, which does not depend on the location of the corpus."""

    name: str  # path inside the corpus, with forward slashes
    text: str


Parts = tuple[list[Document], list[Document], list[Document]]  # training, validation, test


def read_documents(corpus: str) -> list[Document]:
    """Return the text documents of `find_corpus`, sorted by name.

    A text file is one document, and so is each line of JSON lines or row of Parquet, with its text
    under the key 'text'. In a folder of text, binary files and empty files are left out. Raises
    ConfigError if no text remains, or if a text cannot be read.
    """
    files, unread = find_corpus(corpus)
    in_folder = corpus == 'stdlib' or is_folder(Path(corpus).expanduser())
    documents: list[Document] = []
    for file in files:
        try:
            documents += _text(file) if file.format == 'text' else _lines(file)
        except NoTextError:
            if not in_folder:
                raise
            unread.append(file.name)
    if not any(document.text for document in documents):
        raise mistake('data.corpus', f'{corpus!r} contains no text; give {KINDS}')
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
    if len(documents) == 1:
        return _cut(documents[0], _ends(split))
    numbers = split_names([document.name for document in documents], split)
    train, validation, test = ([documents[number] for number in part] for part in numbers)
    return train, validation, test


def split_names(names: Sequence[str], split: str, *, of: str = 'documents') -> list[list[int]]:
    """Return the numbers of the names in each part, as `split_documents` splits documents.

    `of` is what the names are of, for the error.
    """
    ends = _ends(split)
    weights = np.diff(ends, prepend=0.0)
    if len(names) < sum(weights > 0):
        message = (
            f'{split!r} asks for more parts than there are {of} ({len(names)}); '
            f"use '{'95,5,0' if len(names) > 1 else '1,0,0'}', or a larger data.corpus"
        )
        raise mistake('data.split', message, 'data.corpus')
    hashes = [_hash(name) for name in names]
    parts: list[list[int]] = [[], [], []]
    for number in sorted(range(len(names)), key=hashes.__getitem__):
        parts[bisect_right(ends, hashes[number])].append(number)
    for i, weight in enumerate(weights):
        if weight and not parts[i]:
            giver = max(range(3), key=lambda j: len(parts[j]))
            parts[i].append(parts[giver].pop(-1 if giver < i else 0))
    return parts


def _ends(split: str) -> list[float]:
    weights = [float(weight) for weight in split.split(',')]
    return [end / sum(weights) for end in accumulate(weights)]


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


def _hash(name: str) -> float:
    digest = sha256(name.encode(errors='surrogateescape')).digest()
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
        fix = as_messages(first, place) or FIXES.no_key
        raise mistake(place, f'has neither "text" nor "messages" (its keys: {keys}); {fix}')
    for number, text in enumerate(_texts(file)):
        yield Document(name=f'{file.name}:{number:012}', text=text)


def _texts(file: CorpusFile, key: str = 'text') -> Iterator[str]:
    for piece, _ in read_pieces([input_of(file)], key, Position(), fixes=FIXES):
        for text in parse(piece, key, FIXES):
            if isinstance(text, Problem):
                raise ConfigError(text)
            yield text
