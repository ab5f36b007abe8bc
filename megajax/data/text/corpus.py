"""Text documents, and their split into training, validation and test parts."""

import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path

from megajax.config.errors import ConfigError, Problem
from megajax.data.build.inputs import find_inputs
from megajax.data.build.parse import parse
from megajax.data.build.pieces import Position
from megajax.data.build.read import read_pieces
from megajax.data.build.remote import is_remote

JSON_LINES = ('.jsonl', '.jsonl.gz', '.jsonl.zst')
NOT_STDLIB = frozenset(
    {'site-packages', 'dist-packages', '__pycache__', 'test', 'tests', 'idle_test'}
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and its name, which does not depend on the location of the corpus."""

    name: str  # path inside the corpus, with slashes
    text: str


Parts = tuple[list[Document], list[Document], list[Document]]  # training, validation, test


def read_documents(corpus: str) -> list[Document]:
    """Return the documents of `corpus`, sorted by name: 'stdlib', a file, or all files of a folder.

    A file is one document; in .jsonl (also .jsonl.gz and .jsonl.zst) each line is one, with its
    text under the key 'text'. 'stdlib' is the running interpreter's own library, without its tests
    and installed packages. Hidden files, files with NUL bytes and empty files of a folder are
    skipped. Raises ConfigError if no text remains, or if a text cannot be read, as a URL cannot.
    """
    if is_remote(corpus):
        raise _error(
            f'{corpus} is a URL, which a run does not read: run megajax data build OUT --input '
            f'{corpus}, and set data.corpus=OUT'
        )
    documents = _read_stdlib() if corpus == 'stdlib' else _read_path(Path(corpus).expanduser())
    if not documents:
        raise _error(f"{corpus!r} holds no text; give a file or a folder that does, or 'stdlib'")
    return sorted(documents, key=lambda document: document.name)


def split_documents(documents: Sequence[Document], split: str) -> Parts:
    """Split documents into training, validation and test parts by weights, for example '95,5,0'.

    The hash of a document's name decides, so a document stays in its part when others are added,
    and the first documents of a part are a fair sample of it. A part with a weight is never empty:
    it takes the document nearest to it. A single document is cut into consecutive texts. Raises
    ConfigError if there are fewer documents than parts.
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


def _read_stdlib() -> list[Document]:
    root = Path(sysconfig.get_path('stdlib'))
    documents = []
    for path in _files(root, NOT_STDLIB):
        if path.suffix == '.py':
            with suppress(UnicodeDecodeError):
                documents += _documents(path, root)
    return documents


def _read_path(root: Path) -> list[Document]:
    if not root.exists():
        raise _error(f"there is no {root}; give a text file, a folder of them, or 'stdlib'")
    documents: list[Document] = []
    for path in [root] if root.is_file() else _files(root):
        try:
            read = _lines if path.name.endswith(JSON_LINES) else _documents
            documents += read(path, root if root.is_dir() else root.parent)
        except UnicodeDecodeError as error:
            raise _error(
                f'{path} is not UTF-8 at byte {error.start}; '
                'convert it, for example with iconv, or remove it'
            ) from error
        except OSError as error:
            raise _error(
                f'{path} cannot be read: {error.strerror}; make it readable, or remove it'
            ) from error
    return documents


def _documents(path: Path, root: Path) -> list[Document]:
    """Return the file as a document, or nothing if it is empty or binary."""
    content = path.read_bytes()
    if not content or b'\0' in content:
        return []
    return [Document(name=path.relative_to(root).as_posix(), text=content.decode())]


def _lines(path: Path, root: Path) -> Iterator[Document]:
    """Yield each line of a JSON file as a document; names sort as the lines do."""
    pieces = read_pieces(find_inputs([str(path)], 'jsonl'), 'text', Position())
    texts = (text for piece, _ in pieces for text in parse(piece, 'text'))
    for number, text in enumerate(texts):
        if isinstance(text, Problem):
            mistake, _ = text.message.rsplit('; ', 1)
            fix = 'fix it, or use megajax data build, which can read another key or skip such lines'
            raise ConfigError(replace(text, message=f'{mistake}; {fix}'))
        yield Document(name=f'{path.relative_to(root).as_posix()}:{number:012}', text=text)


def _files(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith('.')]
        paths = (Path(folder, name) for name in names if not name.startswith('.'))
        yield from (path for path in paths if path.is_file())  # no broken links, no pipes


def _error(message: str) -> ConfigError:
    return ConfigError(Problem(path='data.corpus', message=message))
