"""Map tokens to bytes, and bytes to text."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from megajax.base.errors import mistake

if TYPE_CHECKING:
    import tokenizers

MOST_IDS = 1 << 24  # about sixty times the size of the largest vocabularies
UNFINISHED = '\ufffd'  # stands for bytes that are not a character, or not a complete one yet
BYTE = re.compile('<0x[0-9A-Fa-f]{2}>')  # a byte in a vocabulary with byte fallback


def count_token_bytes(backend: 'tokenizers.Tokenizer', spec: str) -> np.ndarray:
    """Return the number of UTF-8 bytes of each token, int32 [vocab_size], 0 for special tokens.

    Raises ConfigError, which names `spec`, if tokens do not stand for bytes, or if an id is
    MOST_IDS or more.
    """
    from tokenizers.decoders import ByteLevel

    byte_level = isinstance(backend.decoder, ByteLevel)
    word_piece = type(backend.model).__name__ == 'WordPiece'
    if not (byte_level or word_piece or _has_byte_fallback(backend)):
        raise mistake(
            'data.tokenizer',
            f'{spec} has tokens that do not stand for bytes; '
            'use a byte-level BPE or one with byte fallback',
        )
    vocab = backend.get_vocab()
    last = max(vocab, key=vocab.__getitem__)
    if vocab[last] >= MOST_IDS:
        raise mistake(
            'data.tokenizer',
            f'{spec} gives {last!r} the id {vocab[last]}, but ids end at {MOST_IDS - 1}; '
            'number its tokens from 0',
        )
    token_bytes = np.zeros(1 + vocab[last], np.int32)
    for name, i in backend.get_vocab(with_added_tokens=False).items():
        num_bytes = (
            len(name.removeprefix('##').encode()) if word_piece else _sentencepiece_bytes(name)
        )
        # a byte-level name has a letter for each byte
        token_bytes[i] = len(name) if byte_level else num_bytes
    for i, token in backend.get_added_tokens_decoder().items():
        token_bytes[i] = 0 if token.special else len(token.content.encode())
    return token_bytes


def _has_byte_fallback(backend: 'tokenizers.Tokenizer') -> bool:
    # this kind of model has no attribute that says so
    if type(backend.model).__name__ == 'Unigram':
        state: bytes = backend.model.__getstate__()
        return b'"byte_fallback":true' in state
    return bool(getattr(backend.model, 'byte_fallback', False))


def without_broken_bytes(tokens: Iterable[str]) -> Iterator[str]:
    """Yield tokens with U+FFFD for bytes that do not form a character."""
    for is_byte, run in groupby(tokens, lambda token: bool(BYTE.fullmatch(token))):
        if not is_byte:
            yield from run
            continue
        for character in bytes(int(token[3:5], 16) for token in run).decode(errors='replace'):
            if character == UNFINISHED:
                yield character
            else:
                yield from (f'<0x{byte:02X}>' for byte in character.encode())


def _sentencepiece_bytes(name: str) -> int:
    """Return the number of bytes of a SentencePiece token: U+2581 is a space, <0x0A> a byte.

    U+2581 also stands for the space that is put before a text.
    """
    return 1 if BYTE.fullmatch(name) else len(name.replace('\u2581', ' ').encode())
