"""Convert text to token ids and back.

The tokens are bytes, or come from a byte-level BPE trained here or from a Hugging Face
tokenizer.json.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from megajax.base.errors import ConfigError, mistake, reason
from megajax.base.files.exists import is_file
from megajax.base.files.outputs import url_of
from megajax.base.files.pointers import repair
from megajax.runtime.data.text.byte_level import END_OF_DOCUMENT, bpe_backend, bytes_backend
from megajax.runtime.data.text.byte_tokens import (
    UNFINISHED,
    count_token_bytes,
    without_broken_bytes,
)
from megajax.runtime.data.text.embedding_rows import NoRowError, fit_to_rows
from megajax.runtime.data.text.long_texts import PART, WHOLE, UncuttableError, encode_in_parts
from megajax.runtime.data.text.pieces import (
    GUARDS,
    IMAGE,
    MarkedTokenizer,
    Piece,
    reader_of_letters,
)
from megajax.runtime.data.text.token_names import TokenNames, name_tokens, names_file, start_ids

if TYPE_CHECKING:
    import tokenizers

UINT16_BELOW = 65500  # dtype limit, as in megatron-core's `DType.optimal_dtype`
# number of documents per call of `tokenizers`, which holds some 90 bytes for each of their tokens
DOCUMENTS_AT_ONCE = 64


class Tokenizer:
    """A `tokenizers.Tokenizer` with the attributes that training needs.

    `vocab_size` is the number of ids, `eod` the id of the end-of-document token, and `start` the
    ids with which a document begins, such as Llama's <|begin_of_text|>, if any. `ends` has the ids
    that end a generated text: `eod`, and the ids that `also_ends` adds. `named_tokens` has the
    names of special tokens by role, such as bos_token, like transformers' `special_tokens_map`; it
    is empty for a tokenizer.json without other files. `token_bytes` (int32 [vocab_size]) holds the
    number of UTF-8 bytes that each token stands for, 0 for a special token. `dtype` is uint16 for
    small vocabularies, else int32. `is_lossless` is false for BERT's WordPiece, which drops spaces
    and perhaps case; the dropped bytes are not counted. Raises ConfigError, which names `spec`, if
    there is no end-of-document token, if tokens do not stand for bytes, or if an id is MOST_IDS or
    more.
    """

    def __init__(
        self,
        backend: 'tokenizers.Tokenizer',
        spec: str,
        names: TokenNames = TokenNames(),  # noqa: B008 (immutable)
    ) -> None:
        backend.encode_special_tokens = True  # text that spells a special token is still text
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab()
        ends = [names.end] if names.end else [end for end in END_OF_DOCUMENT if end in vocab]
        if not ends or ends[0] not in vocab:
            raise mistake(
                'data.tokenizer',
                f'{spec} has no end-of-document token; add one of {", ".join(END_OF_DOCUMENT)}, '
                f'or name yours as eos_token in {names_file(spec)}',
            )
        self._backend, self._spec, self.names = backend, spec, names
        self.named_tokens = dict(names.named)
        self.eod = vocab[ends[0]]
        self._reader = reader_of_letters(backend)
        self._marked: MarkedTokenizer | None = None
        self.ends: tuple[int, ...] = (self.eod,)
        self.start = start_ids(backend)
        self._decodes_bytes = b'"ByteFallback"' in (
            backend.decoder.__getstate__() if backend.decoder else b''
        )
        self.is_lossless = type(backend.model).__name__ != 'WordPiece'
        self.token_bytes = count_token_bytes(backend, spec)
        self.token_bytes[self.eod] = 0
        self.vocab_size = self._rows = len(self.token_bytes)
        self.dtype = np.dtype(np.uint16 if self.vocab_size < UINT16_BELOW else np.int32)
        self.fingerprint = sha256(backend.to_str().encode()).hexdigest()

    def parsing_special(self) -> Self:
        """Return a copy that, like transformers, reads spelled special tokens as special tokens."""
        parsing = copy(self)
        parsing._reader = type(self._backend).from_str(self._backend.to_str())
        return parsing

    def encode_batch(
        self, texts: Sequence[str], *, before: str = '', after: str = ''
    ) -> list[np.ndarray]:
        """Return the ids of each text, without start and end-of-document tokens.

        `before` is the text before the first text in its document, and `after` is the text that
        follows the last one; ids are the same as in the whole document. A long text is encoded in
        parts. Raises UncuttableError for a text that can be encoded neither in parts nor at once
        (`long_texts.py`).
        """
        if before or after or max(map(len, texts), default=0) > PART:
            last = len(texts) - 1
            return [
                self._encode_long(text, '' if i else before, '' if i < last else after)
                for i, text in enumerate(texts)
            ]
        return [np.array(ids, self.dtype) for ids in self._encode(texts)]

    def _encode_long(self, text: str, before: str, after: str) -> np.ndarray:
        def encode(part: str) -> Sequence[int]:
            (ids,) = self._encode([part])
            return ids

        def locate(window: str) -> tuple[Sequence[int], Sequence[int]]:
            encoding = self._reader.encode(window, add_special_tokens=False)
            return encoding.ids, [start for start, _ in encoding.offsets]

        try:
            parts = [
                np.array(ids, self.dtype)
                for ids in encode_in_parts(text, before, after, encode, locate)
            ]
        except UncuttableError:
            if before or after or len(text) > WHOLE:
                raise
            parts = [np.array(encode(text), self.dtype)]
        return np.concatenate(parts)

    def _encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        try:
            encodings = self._reader.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            raise self._unknown(error) from error
        for encoding in encodings:
            self._check_rows(encoding.ids)
        return [encoding.ids for encoding in encodings]

    def _unknown(self, error: Exception) -> ConfigError:
        # the text has a character that the vocabulary lacks, and there is no token for unknown ones
        return mistake(
            'data.tokenizer',
            f'{self._spec} cannot encode a text ({reason(error)}); '
            'use a tokenizer that knows every text, such as a byte-level BPE',
        )

    def encode_pieces(
        self, pieces: Sequence[Piece], *, sizes: Sequence[int] = (), image_token: int = IMAGE
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of consecutive pieces of a document, and whether each counts in the loss.

        The ids do not depend on how the document is cut into pieces, and exclude start and
        end-of-document tokens. Image n becomes sizes[n] times `image_token`. An id counts if its
        token covers an answered character, as in the mask of transformers' `apply_chat_template`.
        Raises UncuttableError for a document of more than `long_texts.WHOLE` characters.
        """
        text = ''.join(piece.text for piece in pieces)
        if len(text) > WHOLE:
            raise UncuttableError
        if self._marked is None or self._marked.guard in text:
            guard = next((guard for guard in GUARDS if guard not in text), '')
            if not guard:
                raise mistake(
                    'data.tokenizer',
                    'cannot read a text that has all noncharacters from U+FDD0 to U+FDEE',
                )
            self._marked = MarkedTokenizer(self._backend, guard)
        try:
            ids, answered = self._marked.encode(pieces, sizes, image_token)
        except ConfigError:
            raise
        except Exception as error:
            raise self._unknown(error) from error
        self._check_rows(ids)
        return ids, answered

    def limit(self, rows: int) -> dict[int, str]:
        """Return the tokens with ids of `rows` or more by id, and reject texts that contain them.

        A model with `rows` entries has no rows for them in its embedding.
        """
        self._rows = min(rows, self.vocab_size)
        self.token_bytes[self._rows :] = 0
        names = map(self._backend.id_to_token, range(self._rows, self.vocab_size))
        return {i: name for i, name in enumerate(names, self._rows) if name is not None}

    def _check_rows(self, ids: Sequence[int]) -> None:
        if self._rows < self.vocab_size and (last := max(ids, default=0)) >= self._rows:
            name = str(self._backend.id_to_token(last))
            raise NoRowError(self._spec, name, last, self._rows, self.vocab_size)

    def also_ends(self, ids: Iterable[int]) -> None:
        """Also end generated texts at these ids, such as the end of a turn."""
        self.ends = tuple(dict.fromkeys([*self.ends, *ids]))

    def token_id(self, name: str) -> int | None:
        """Return the id of a token by its name, or None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(name)
        return token_id

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of the special tokens by name."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @property
    def added_tokens(self) -> frozenset[int]:
        """The ids of tokens that are matched in texts before the vocabulary is used."""
        return frozenset(self._backend.get_added_tokens_decoder())

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; special tokens appear by name, invalid UTF-8 as U+FFFD.

        `tokenizers` turns a whole run of byte-fallback tokens into U+FFFD if one byte is invalid;
        here, the valid characters remain.
        """
        numbers = [int(i) for i in ids]
        text: str = self._backend.decode(numbers, skip_special_tokens=False)
        if UNFINISHED not in text or not self._decodes_bytes:
            return text
        tokens = filter(None, map(self._backend.id_to_token, numbers))
        return str(self._backend.decoder.decode(list(without_broken_bytes(tokens))))

    def save(self, path: str | Path) -> None:
        """Write a tokenizer.json, and its tokens' names to a tokenizer_config.json next to it."""
        self.save_json(path)
        self.names.save(Path(path))

    def save_json(self, path: str | Path) -> None:
        """Write a tokenizer.json under any name, without its tokens' names."""
        self._backend.save(str(path))


def make_tokenizer(
    spec: str,
    vocab_size: int,
    texts: Sequence[str] = (),
    *,
    special: Sequence[str] = (),
    or_else: str = '',
) -> Tokenizer:
    """Make the tokenizer that `spec` names.

    `spec` is 'bytes', 'bpe' (trained on `texts` to `vocab_size` entries) or the path of a
    tokenizer.json. `special` names tokens that the tokenizer must have; they are added to bytes and
    to a BPE. A BPE has fewer entries if the texts have no more pairs to merge. Raises ConfigError
    if the file cannot be used or lacks special tokens, or if there are more entries than
    `vocab_size`, except for added tokens (`embedding_rows.py`); see `load_tokenizer` for `or_else`.
    """
    tokenizer = (
        byte_tokenizer(special)
        if spec == 'bytes'
        else train_bpe(texts, vocab_size, special)
        if spec == 'bpe'
        else load_tokenizer(spec, or_else=or_else)
    )
    if not special and not tokenizer.is_lossless:
        raise mistake(
            'data.tokenizer',
            f'{spec} is a WordPiece tokenizer, whose tokens cannot be converted back to the text; '
            'use a byte-level BPE or one with byte fallback',
        )
    if missing := [name for name in special if tokenizer.token_id(name) is None]:
        raise mistake(
            'data.tokenizer',
            f'{spec} has no {", ".join(missing)}, which model.objective=masked_lm needs; '
            'give a tokenizer.json that has them',
        )
    fit_to_rows(tokenizer, vocab_size, spec, special)
    return tokenizer


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the concatenated ids of all texts, in `tokenizer.dtype`, and their lengths, int32.

    Each text is a document, with its start and end-of-document tokens.
    """
    begin, end = (np.array(ids, tokenizer.dtype) for ids in (tokenizer.start, [tokenizer.eod]))
    pieces, lengths = [end[:0]], np.zeros(len(texts), np.int32)
    for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
        for i, ids in enumerate(
            tokenizer.encode_batch(texts[start : start + DOCUMENTS_AT_ONCE]), start
        ):
            pieces += [begin, ids, end]
            lengths[i] = len(begin) + len(ids) + 1
    return np.concatenate(pieces), lengths


def byte_tokenizer(special: Sequence[str] = ()) -> Tokenizer:
    """Make a tokenizer of bytes: ids 0 to 255 are the bytes, 256 ends a document.

    The tokens of `special` follow.
    """
    return Tokenizer(bytes_backend(special), 'bytes')


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` entries; the same texts give the same tokenizer.

    The last entries are the end-of-document token and the tokens of `special`.
    """
    return Tokenizer(bpe_backend(texts, vocab_size, special), 'bpe')


def load_tokenizer(path: str, *, or_else: str = '') -> Tokenizer:
    """Load a Hugging Face tokenizer.json, or make the tokenizer of 'bytes'.

    The files next to it, such as tokenizer_config.json, name its tokens (`token_names.py`). Raises
    ConfigError, with the further fix `or_else`, if a file does not exist or cannot be used.
    """
    if path == 'bytes':
        return byte_tokenizer()
    import tokenizers

    file = Path(path).expanduser()
    if not is_file(file, 'data.tokenizer'):
        message = f"there is no file {path}; give a tokenizer.json or 'bytes'{or_else}"
        if url_of(file):
            message = f'{path} is a URL; copy the file and those next to it, and give its path'
        raise mistake('data.tokenizer', message)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises no more specific error
        raise mistake(
            'data.tokenizer',
            f'{path} is not a tokenizer.json ({error}); {repair(file)}, or give one that the '
            f"tokenizers library wrote, or 'bytes'{or_else}",
        ) from error
    names, backend = name_tokens(file, backend)
    return Tokenizer(backend, path, names)
