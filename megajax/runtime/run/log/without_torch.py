"""Import a package without torch, which it would import only for its types."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_torch() -> Iterator[None]:
    """Let `import torch` raise ImportError in the block, unless torch is imported already.

    The import takes seconds, and a broken torch may raise any error.
    """
    if 'torch' in sys.modules:
        yield
        return
    modules = cast('dict[str, Any]', sys.modules)
    modules['torch'] = None  # the import system's own mark of a module that must not be imported
    try:
        yield
    finally:
        del modules['torch']
