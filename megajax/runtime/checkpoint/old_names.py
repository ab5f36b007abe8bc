"""Translate between current parameter names and the names in checkpoints of earlier versions.

Until 0.1 the norm of a sublayer was next to it in a layer: `layers.attention_norm.weight` is now
`layers.attention.norm.weight`. All names in a checkpoint are from one version.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

OLD = re.compile(r'\b(attention|mlp)_norm\b')
NOW = re.compile(r'\b(attention|mlp)([./])norm\b')


def current(name: str) -> str:
    """Return the name of an array, with dots or slashes, in this version."""
    return OLD.sub(r'\1/norm' if '/' in name else r'\1.norm', name)


def old(name: str) -> str:
    """Return the name of an array, with dots or slashes, in earlier versions."""
    return NOW.sub(r'\1_norm', name)


def renamed(tree: Any, rename: Callable[[str], str]) -> Any:
    """Return a tree whose parameters are renamed by `rename`, which is `old` or `current`."""

    def of_state(state: Any) -> Any:
        if not isinstance(state, nnx.State):
            return state
        flat = [
            (tuple(rename('.'.join(map(str, path))).split('.')), x)
            for path, x in nnx.to_flat_state(state)
        ]
        return nnx.from_flat_state(flat)

    return jax.tree.map(of_state, tree, is_leaf=lambda x: isinstance(x, nnx.State))
