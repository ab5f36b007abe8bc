"""Find the first site at which two models, meshes or versions compute different numbers.

`megajax.compare.compare(a, b)` compares two sources, and `megajax.compare.dump` records one.

A pass is one forward and one backward pass over the same batch. `sources.py` reads both sides,
`execute.py` computes their numbers, `difference.py` compares them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megajax.analysis.compare.api import compare as compare
    from megajax.analysis.compare.api import dump as dump

__all__ = ['compare', 'dump']


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f'module {__name__} has no attribute {name!r}')
    return getattr(import_module(f'{__name__}.api'), name)
