"""Text to token ids and back: by bytes, by a byte-level BPE trained here, or as a Hugging Face tokenizer.json says."""

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megajax.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    import tokenizers

UINT16_BELOW = 65500  # as in megatron-core's `DType.optimal_dtype`
DOCUMENTS_AT_ONCE = 64  # tokenizers holds some 90 bytes for each token of a call
END_OF_DOCUMENT = (
    '<|endoftext|>',
    '</s>',
    '<|end_of_text|>',
    '[SEP]',
)  # GPT-2 and ours, Llama 2, Llama 3, BERT

# What BPE may merge: a word with the space before it, punctuation with the blanks, line break and indentation after it, blanks.
# Bytes per token of the standard library at 1024, 2048 and 4096 entries: 2.75, 3.30, 3.82; with GPT-2's pattern 2.62, 3.08, 3.48.
PIECES = r' ?\w+| ?[^\w\s]+\s*|\s+'


class Tokenizer:
    """A `tokenizers.Tokenizer` and what training asks of it.

    `vocab_size` counts the ids, `eod` is the id of the end-of-document token, `token_bytes` (int32 [vocab_size]) counts the UTF-8
    bytes that each token stands for, 0 for a special one, and `dtype` is uint16 for small vocabularies, else int32. `start` has the ids
    that a document begins with, such as Llama's <|begin_of_text|>, if there are any. `is_lossless` is false of BERT's WordPiece, which
    drops spaces and perhaps case: only what is left is counted.
    Raises ConfigError, which calls it `spec`, if there is no end-of-document token or tokens do not stand for bytes.
    """

    def __init__(self, backend: 'tokenizers.Tokenizer', spec: str) -> None:
        backend.encode_special_tokens = True  # text that spells a special token is still text
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab()
        names = [name for name in END_OF_DOCUMENT if name in vocab]
        if not names:
            raise _error(
                f'{spec} has no end-of-document token; add one of {", ".join(END_OF_DOCUMENT)}'
            )
        self._backend = backend
        self.eod = vocab[names[0]]
        self.start = _start(backend)
        self.is_lossless = type(backend.model).__name__ != 'WordPiece'
        self.token_bytes = _token_bytes(backend, spec)
        self.token_bytes[self.eod] = 0
        self.vocab_size = len(self.token_bytes)
        self.dtype = np.dtype(np.uint16 if self.vocab_size < UINT16_BELOW else np.int32)
        self.fingerprint = sha256(backend.to_str().encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without what a document starts and ends with."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]

    def token_id(self, name: str) -> int | None:
        """The id of a token, by its name."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens appear by name, bytes that are not UTF-8 as U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face tokenizer.json, which `make_tokenizer` reads."""
        self._backend.save(str(path))


def make_tokenizer(
    spec: str, vocab_size: int, texts: Sequence[str] = (), *, special: Sequence[str] = ()
) -> Tokenizer:
    """The tokenizer that `spec` names: 'bytes', 'bpe' (trained on `texts` to `vocab_size` entries) or a tokenizer.json.

    `special` names tokens that it must have, which bytes and a BPE are given. A BPE has fewer entries where the texts have no more
    pairs to merge. Raises ConfigError if the file cannot be used or lacks special tokens, or if there are more entries than
    `vocab_size`.
    """
    made = spec in ('bytes', 'bpe')
    tokenizer = (
        byte_tokenizer(special)
        if spec == 'bytes'
        else train_bpe(texts, vocab_size, special)
        if made
        else load_tokenizer(spec)
    )
    if not special and not tokenizer.is_lossless:
        raise _error(
            f'{spec} is a WordPiece, from whose tokens no text comes back; use a byte-level BPE or one with byte fallback'
        )
    if missing := [name for name in special if tokenizer.token_id(name) is None]:
        raise _error(
            f'{spec} has no {", ".join(missing)}, which model.objective=masked_lm needs; give a tokenizer.json that has them'
        )
    if tokenizer.vocab_size > vocab_size:
        message = f'{vocab_size} is below the {tokenizer.vocab_size} entries of data.tokenizer={spec}; use {tokenizer.vocab_size} or more'
        raise ConfigError(
            Problem(path='model.vocab_size', message=message, others=('data.tokenizer',))
        )
    return tokenizer


def encode_documents(texts: Sequence[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all texts in a row, each a document from its start to its end, as `tokenizer.dtype`, and their lengths, int32."""
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
    """One token per byte, its id the byte, the end of a document, 256, and special tokens."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    # GPT-2 spells a byte as a letter: itself where that prints, else the next one from U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    letters = dict(zip(sorted(ByteLevel.alphabet()), printable + others, strict=True))
    backend = _byte_level(BPE(vocab=letters, merges=[]))
    backend.add_special_tokens([END_OF_DOCUMENT[0], *special])
    return Tokenizer(backend, 'bytes')


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries, the last of them the end of a document and special tokens.

    The same texts give the same one.
    """
    from tokenizers import Regex, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    backend = _byte_level(BPE())
    split = pre_tokenizers.Split(Regex(PIECES), 'isolated')
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    size, alphabet = vocab_size - 1 - len(special), pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([END_OF_DOCUMENT[0], *special])
    return Tokenizer(backend, 'bpe')


def load_tokenizer(path: str) -> Tokenizer:
    """'bytes', or the tokenizer of a Hugging Face tokenizer.json; raises ConfigError if there is none or it cannot be used."""
    if path == 'bytes':
        return byte_tokenizer()
    import tokenizers

    file = Path(path).expanduser()
    if not file.is_file():
        raise _error(f"there is no file {path}; give a tokenizer.json, 'bpe' or 'bytes'")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise _error(
            f"{path} is not a tokenizer.json: {error}; give one that the tokenizers library wrote, 'bpe' or 'bytes'"
        ) from error
    return Tokenizer(backend, path)


def _byte_level(model: 'tokenizers.models.BPE') -> 'tokenizers.Tokenizer':
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _start(backend: 'tokenizers.Tokenizer') -> list[int]:
    """What a tokenizer.json says comes before every text; [CLS] is for masked data to put."""
    encoding = backend.encode('a')
    added = takewhile(
        lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    )
    return [i for i, _ in added if backend.id_to_token(i) != '[CLS]']


def _token_bytes(backend: 'tokenizers.Tokenizer', spec: str) -> np.ndarray:
    from tokenizers.decoders import ByteLevel

    byte_level = isinstance(backend.decoder, ByteLevel)
    word_piece = type(backend.model).__name__ == 'WordPiece'
    if not (byte_level or word_piece or getattr(backend.model, 'byte_fallback', False)):
        raise _error(
            f'{spec} has tokens that do not stand for bytes; use a byte-level BPE or one with byte fallback'
        )
    token_bytes = np.zeros(1 + max(backend.get_vocab().values()), np.int32)
    for name, i in backend.get_vocab(with_added_tokens=False).items():
        spelled = (
            len(name.removeprefix('##').encode()) if word_piece else _sentencepiece_bytes(name)
        )
        token_bytes[i] = len(name) if byte_level else spelled  # byte-level: a letter for each byte
    for i, token in backend.get_added_tokens_decoder().items():
        token_bytes[i] = 0 if token.special else len(token.content.encode())
    return token_bytes


def _sentencepiece_bytes(name: str) -> int:
    """U+2581 is a space, also the one put before a text, and <0x0A> a byte."""
    return 1 if re.fullmatch('<0x[0-9A-F]{2}>', name) else len(name.replace('\u2581', ' ').encode())


def _error(message: str) -> ConfigError:
    return ConfigError(Problem(path='data.tokenizer', message=message))
