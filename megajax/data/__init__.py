"""From a corpus to batches. Imports no jax itself; grain, which shuffles, does where it is installed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megajax.config.schema import Config
from megajax.data.batches import Batch, Batches, encode_documents
from megajax.data.corpus import Document, read_documents, split_documents
from megajax.data.tokenizer import Tokenizer, make_tokenizer

__all__ = [
    'Batch',
    'Batches',
    'Data',
    'Document',
    'Size',
    'Tokenizer',
    'encode_documents',
    'load_data',
    'make_tokenizer',
    'read_documents',
    'split_documents',
]


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a part of the corpus is: documents, tokens with the ends of documents, and UTF-8 bytes of text."""

    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a run trains and validates on; `validation` is in order, and has no batches if `data.split` gives it nothing."""

    tokenizer: Tokenizer
    train: Batches
    validation: Batches
    train_size: Size
    validation_size: Size

    @property
    def summary(self) -> str:
        """One line for the head of a run."""
        train, validation, tokenizer = self.train_size, self.validation_size, self.tokenizer
        return (
            f'{train.documents} documents ({train.bytes / 1e6:.1f} MB) to train on, {validation.documents} '
            f'({validation.bytes / 1e6:.1f} MB) to validate; {tokenizer.vocab_size} tokens, {train.bytes / train.tokens:.2f} bytes each'
        )


def load_data(config: Config) -> Data:
    """Read, split and tokenise the corpus of `config`; raises ConfigError if it cannot be used or does not fill a batch."""
    train, validation, _ = split_documents(read_documents(config.data.corpus), config.data.split)
    tokenizer = make_tokenizer(config.data.tokenizer, config.model.vocab_size, train)
    train_tokens, validation_tokens = encode_documents(train, tokenizer), encode_documents(validation, tokenizer)
    seq_len, batch_size = config.train.seq_len, config.train.batch_size
    return Data(
        tokenizer=tokenizer,
        train=Batches(train_tokens, seq_len=seq_len, batch_size=batch_size, seed=config.train.seed),
        validation=Batches(validation_tokens, seq_len=seq_len, batch_size=batch_size),
        train_size=_size(train, train_tokens),
        validation_size=_size(validation, validation_tokens),
    )


def _size(documents: Sequence[Document], tokens: np.ndarray) -> Size:
    return Size(documents=len(documents), tokens=len(tokens), bytes=sum(len(document.text.encode()) for document in documents))
