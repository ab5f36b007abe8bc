"""Read a corpus, and make batches of it.

This package imports no jax itself. grain, which orders and prefetches samples, imports jax if it is
installed.
"""

from megajax.runtime.data.batches import Batch, Batches
from megajax.runtime.data.load import Data, load_data
from megajax.runtime.data.text.corpus import Document, read_documents, split_documents
from megajax.runtime.data.text.tokenizer import Tokenizer, encode_documents, make_tokenizer

__all__ = [
    'Batch',
    'Batches',
    'Data',
    'Document',
    'Tokenizer',
    'encode_documents',
    'load_data',
    'make_tokenizer',
    'read_documents',
    'split_documents',
]
