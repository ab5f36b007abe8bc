"""Read a corpus, and make batches of it.

This package imports no jax itself. grain, which orders and prefetches samples, imports jax if it is
installed. Each name is imported on first use, so that the workers of a build and the command line
start without what only a run needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megajax.runtime.data.batches import Batch as Batch
    from megajax.runtime.data.batches import Batches as Batches
    from megajax.runtime.data.load import Data as Data
    from megajax.runtime.data.load import load_data as load_data
    from megajax.runtime.data.text.corpus import Document as Document
    from megajax.runtime.data.text.corpus import read_documents as read_documents
    from megajax.runtime.data.text.corpus import split_documents as split_documents
    from megajax.runtime.data.text.tokenizer import Tokenizer as Tokenizer
    from megajax.runtime.data.text.tokenizer import encode_documents as encode_documents
    from megajax.runtime.data.text.tokenizer import make_tokenizer as make_tokenizer

_NAMES = {
    'batches': ('Batch', 'Batches'),
    'load': ('Data', 'load_data'),
    'text.corpus': ('Document', 'read_documents', 'split_documents'),
    'text.tokenizer': ('Tokenizer', 'encode_documents', 'make_tokenizer'),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.{_HOMES[name]}'), name)
