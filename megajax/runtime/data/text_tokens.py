"""Tokens of a text corpus: read and tokenized when a run starts, or read from the cache."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import file_digest, sha256
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple
from zlib import crc32

import jax

from megajax.base.errors import ConfigError
from megajax.base.files.locks import folder_lock
from megajax.base.files.outputs import sync
from megajax.core.config import Config
from megajax.runtime.data.corpus_tokenizer import is_trained, tokenizer_of_text
from megajax.runtime.data.sources.block_cache import locked
from megajax.runtime.data.text.corpus import (
    copies_warning,
    naming_lines,
    read_documents,
    split_documents,
)
from megajax.runtime.data.text.files import find_corpus
from megajax.runtime.data.text.parts import Part
from megajax.runtime.data.text.spelled_tokens import warning_of_texts
from megajax.runtime.data.text.tokenizer import Tokenizer, encode_documents
from megajax.runtime.data.token_pairs import cache_of
from megajax.runtime.data.tokens.indexed import (
    CHUNK,
    Sequences,
    from_lengths,
    paths,
    read_pair,
    write_index,
)

# Version of the conversion from files to tokens; tokens of other versions are not used.
VERSION = 1
TOKENIZER, ABOUT, PARTS = 'tokenizer.json', 'about.json', ('train', 'validation')

logger = logging.getLogger(__name__)


class TextTokens(NamedTuple):
    """The tokens of a text corpus, in a training and a validation part."""

    tokenizer: Tokenizer
    parts: tuple[Part, Part]
    summary: str  # sizes of the parts, for the first lines of a run
    warnings: tuple[str, ...]  # about the texts


def tokenize(config: Config, tokenizer: Tokenizer | None = None) -> TextTokens:
    """Read the files of a text corpus on the disk, split their documents and tokenize them.

    The default tokenizer is the one of the config, which may be trained on the documents. Raises
    ConfigError as `read_documents` and `tokenizer_of_text` do.
    """
    corpus = config.data.corpus
    documents = read_documents(corpus)
    train, validation, _ = split_documents(documents, config.data.split)
    texts = [[document.text for document in part] for part in (train, validation)]
    if tokenizer is None:
        tokenizer = tokenizer_of_text(config, lambda: texts[0])
    special = tokenizer.special_tokens()
    warnings = warning_of_texts('data.corpus', chain(*texts), special), copies_warning(*texts)
    with naming_lines(documents):
        parts = (_encode(corpus, texts[0], tokenizer), _encode(corpus, texts[1], tokenizer))
    num_bytes = [sum(len(text.encode()) for text in part) for part in texts]
    summary = (
        f'{len(train)} documents ({num_bytes[0] / 1e6:.1f} MB) to train on, '
        f'{len(validation)} ({num_bytes[1] / 1e6:.1f} MB) to validate; '
        f'{tokenizer.vocab_size} tokens, {num_bytes[0] / max(parts[0].num_tokens, 1):.2f} bytes '
        'each'
    )
    return TextTokens(tokenizer, parts, summary, tuple(filter(None, warnings)))


def tokenize_once(config: Config) -> TextTokens:
    """Return the tokens of `tokenize`; of several processes on a host, one makes them.

    They are kept in the cache, in a folder that depends on the contents of the files. Without a
    cache, each process tokenizes.
    """
    if jax.process_count() == 1:
        return tokenize(config)
    corpus = config.data.corpus
    contents = [corpus]
    try:
        for file in find_corpus(corpus).files:
            with file.path.open('rb') as opened:
                contents += file.name, file_digest(opened, sha256).hexdigest()
        here = cache_of(config).folder / sha256(json.dumps(contents).encode()).hexdigest()[:32]
        here.mkdir(exist_ok=True)
    except (ConfigError, OSError) as error:
        logger.warning('each process tokenizes %s by itself: %s', corpus, error)
        return tokenize(config)
    with locked(here, shared=True):
        return KeptTokens(config, here).get()


def _encode(name: str, texts: Sequence[str], tokenizer: Tokenizer) -> Part:
    tokens, lengths = encode_documents(texts, tokenizer)
    return _part(from_lengths(name, tokens, lengths))


def _part(sequences: Sequences) -> Part:
    return Part(sequences=sequences, first=0, last=len(sequences))


class KeptTokens:
    """A folder of the cache for the tokens of a text corpus.

    `here` is the folder of the corpus, whose name depends on the version of each file. A tokenizer
    that is trained on the corpus is kept apart from the tokens, so that a run which resumes with
    its own tokenizer finds the tokens, too. Raises ConfigError if the tokenizer of the config
    cannot be used.
    """

    def __init__(self, config: Config, here: Path) -> None:
        self._config = config
        self._here = here / '.tokens'  # hidden, so that it is no part of the corpus
        self._tokenizer: Tokenizer | None = None
        if not is_trained(config):
            self._tokenizer = tokenizer_of_text(config, lambda: ())
        # The tokens that an earlier run or another process has kept, or None.
        self.found = self._read()

    def get(self) -> TextTokens:
        """Return the kept tokens, or tokenize the corpus and keep its tokens.

        If several processes of a host ask, the first one tokenizes and the others wait.
        """
        if self.found is not None:
            return self.found
        self._here.mkdir(exist_ok=True)
        with folder_lock(self._here, shared=False) as is_first:
            if is_first:
                self.found = self._read()
                if self.found is None:
                    self.found = tokenize(self._config, self._tokenizer)
                    self._keep(self.found)
                return self.found
        with locked(self._here, shared=True):
            self.found = self._read()
        if self.found is None:  # the first process could not keep its tokens
            self.found = tokenize(self._config, self._tokenizer)
        return self.found

    def _folder(self, made_by: str) -> Path:
        """Return the folder of the tokens that a tokenizer makes, or of a trained tokenizer."""
        import tokenizers

        size, split = self._config.model.vocab_size, self._config.data.split
        keys = [VERSION, tokenizers.__version__, made_by, size, split]
        return self._here / sha256(json.dumps(keys).encode()).hexdigest()[:32]

    def _trained(self) -> Path:
        return self._folder(f'bpe {self._config.model.objective}')

    def _tokens(self, tokenizer: Tokenizer) -> Path:
        return self._folder(f'{tokenizer.fingerprint} {tokenizer.eod} {tokenizer.start}')

    def _read(self) -> TextTokens | None:
        """Return the kept tokens, mapped from their files; None if a file is missing or damaged."""
        try:
            if self._tokenizer is None:
                _read_about(self._trained())
                trained = str(self._trained() / TOKENIZER)
                self._tokenizer = tokenizer_of_text(self._config, lambda: (), trained=trained)
            folder = self._tokens(self._tokenizer)
            about = _read_about(folder)
            pairs = [read_pair(folder / name) for name in PARTS]
            summary, warnings = about['summary'], (*about['warnings'],)
        except (OSError, ValueError, KeyError, ConfigError):
            return None
        corpus = self._config.data.corpus
        train, validation = (_part(replace(pair, name=corpus)) for pair in pairs)
        return TextTokens(self._tokenizer, (train, validation), summary, warnings)

    def _keep(self, found: TextTokens) -> None:
        """Write the tokens to the cache; if the disk is full, log a warning and do without."""
        try:
            with _new_folder(self._tokens(found.tokenizer)) as new:
                for name, part in zip(PARTS, found.parts, strict=True):
                    _write_pair(new / name, part.sequences)
                _write_about(new, {'summary': found.summary, 'warnings': found.warnings})
            if is_trained(self._config):
                with _new_folder(self._trained()) as new:
                    found.tokenizer.save(new / TOKENIZER)
                    _write_about(new, {})
        except Exception as error:  # tokenizers raises no narrower exception
            logger.warning(
                'run.data_cache: the tokens cannot be kept in %s, so the next start tokenizes '
                'again: %s',
                self._here,
                error,
            )


@contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder for the block to fill, which then becomes the folder `path`.

    A sound folder of that name stays: a host that shares no locks may have made it, and reads it.
    """
    new = Path(mkdtemp(dir=path.parent))
    try:
        yield new
        for file in new.iterdir():
            sync(file)
        try:
            new.rename(path)
        except OSError:
            if _is_sound(path):
                shutil.rmtree(new)
            else:
                shutil.rmtree(path, ignore_errors=True)
                new.rename(path)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _write_about(folder: Path, about: Mapping[str, Any]) -> None:
    (folder / ABOUT).write_text(json.dumps({**about, 'sums': _sums(folder)}))


def _read_about(folder: Path) -> dict[str, Any]:
    """Return what `_write_about` has written; raise ValueError if a file of the folder differs.

    The time of the files' last use is then now.
    """
    about: dict[str, Any] = json.loads((folder / ABOUT).read_bytes())
    for path in folder.iterdir():
        os.utime(path)
    if _sums(folder) != about['sums']:
        raise ValueError(f'{folder}: a file is damaged')
    return about


def _is_sound(folder: Path) -> bool:
    try:
        _read_about(folder)
    except (OSError, ValueError, KeyError):
        return False
    return True


def _write_pair(prefix: Path, sequences: Sequences) -> None:
    tokens, index = paths(prefix)
    with tokens.open('wb') as file:
        for start in range(0, len(sequences.tokens), CHUNK):
            file.write(sequences.tokens[start : start + CHUNK].data)
    with index.open('wb') as file:
        write_index(file, sequences.tokens.dtype, sequences.lengths, sequences.documents)


def _sums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each file of a folder of tokens, by name."""
    sums = {}
    for path in (path for path in folder.iterdir() if path.name != ABOUT):
        total = 0
        with path.open('rb') as file:
            while piece := file.read(CHUNK):
                total = crc32(piece, total)
        sums[path.name] = total
    return sums
