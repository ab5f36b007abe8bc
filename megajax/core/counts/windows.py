"""The keys that attention reads in layers with sliding windows. Imports no jax."""

import functools
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from megajax.core.config.divisors import divisors
from megajax.core.config.model import ModelConfig
from megajax.core.config.schema import Config
from megajax.xla.hlo.products import keys_in_window

# 1 if all layers are equal; an int is fast, and `plan` counts thousands of layouts
Share = Fraction | int


@functools.cache
def windows(model: ModelConfig) -> Mapping[int | None, Share]:
    """Return, for each window, the share of the layers that have it; None is no window."""
    layers = Counter(layer.window for layer in model.layer_configs)
    if len(layers) == 1:
        return dict.fromkeys(layers, 1)
    return {window: Fraction(count, layers.total()) for window, count in layers.items()}


def windows_within(config: Config) -> Mapping[int | None, Share]:
    """Return, for each window, the share of the layers that have it; None if it hides no key."""
    shares = dict[int | None, Share]()
    for window, share in windows(config.model).items():
        within = window if window and window < config.train.seq_len else None
        shares[within] = shares.get(within, 0) + share
    return shares


def keys_read(window: int | None, length: int, *, flash: bool, dropout: float = 0.0) -> int:
    """Return the number of keys per query that the matmuls of attention count.

    Without a window, this is all keys, of which a causal kernel masks half. With a window, XLA's
    attention reads two blocks of keys, or all keys with dropout.
    """
    if window is None or window >= length:
        return length
    if flash:
        return keys_in_window(window, length)
    block = None if dropout else block_of_window(window, length)
    return 2 * block if block else length


def scored_keys(model: ModelConfig, length: int) -> tuple[Share, int]:
    """Return the keys per query whose scores XLA's attention stores, on average and at most."""
    keys = [
        (keys_read(window, length, flash=False, dropout=model.attention_dropout), share)
        for window, share in windows(model).items()
    ]
    return sum(count * share for count, share in keys), max(keys)[0]


def block_of_window(window: int, length: int) -> int | None:
    """Return the length of the blocks in which XLA computes attention with a window.

    A block of queries reads the keys of its own block and of the previous one. The result is None
    if the sequence would have only two blocks, or if no divisor of its length is large enough.
    """
    return next((n for n in divisors(length) if n >= window and 2 * n < length), None)


def block_in_chunk(window: int, chunk: int, *, flash: bool) -> int:
    """Return the length of the blocks in which a context shard computes a chunk with a window.

    XLA's attention uses the shortest blocks that fit the window.
    """
    return chunk if flash else next(n for n in divisors(chunk) if n >= window)
