"""The log-likelihood of given tokens, and whether each is the one that the model thinks most probable.

B batch, S sequence, C tokens of a chunk, D model, V vocabulary (padded).
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from megajax.config import Config
from megajax.config.chunks import num_chunks
from megajax.generate.sampling import most_probable
from megajax.generate.weights import inference_config
from megajax.model.decoder import model_graph
from megajax.model.loss import Loss
from megajax.parallel import layout

ROWS = 8  # windows at a time
SHORTEST = 16  # tokens that windows are padded to, or a power of two above


class Window(NamedTuple):
    """Tokens of which the last `num_targets` are predicted, each from all before it; at most `max_seq_len` and one."""

    tokens: Sequence[int] | np.ndarray
    num_targets: int


class Scored(NamedTuple):
    """For each target of a window the negative log-likelihood in nats, and whether no token is more probable."""

    nll: np.ndarray
    is_top: np.ndarray


class Scorer:
    """Scores windows with a model on the current mesh; the same numbers on every mesh up to the order of sums."""

    def __init__(self, config: Config, params: nnx.State):
        self.config, self.params = config, params
        self._score = _make_score(config)

    def __call__(self, windows: Iterable[Window]) -> Iterator[Scored]:
        """What each window scores, in their order; those of one batch are padded to the longest."""
        windows = iter(windows)
        while batch := list(islice(windows, self._rows)):
            yield from self._score_batch(batch)

    def in_any_order(self, windows: Sequence[Window]) -> list[Scored]:
        """As calling it, with windows of like lengths in one batch."""
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        scored = dict(zip(order, self(windows[i] for i in order), strict=True))
        return [scored[i] for i in range(len(windows))]

    @property
    def _rows(self) -> int:
        return -(-ROWS // self.config.mesh.data) * self.config.mesh.data

    def _score_batch(self, windows: Sequence[Window]) -> Iterator[Scored]:
        longest = max(len(window.tokens) for window in windows) - 1
        length = min(max(SHORTEST, 1 << (longest - 1).bit_length()), self.config.model.max_seq_len)
        assert longest <= length
        token_BS = np.zeros((self._rows, length + 1), np.int32)
        for row, window in enumerate(windows):
            token_BS[row, : len(window.tokens)] = window.tokens
        nll_BS, is_top_BS = (np.asarray(x) for x in self._score(self.params, token_BS[:, :-1], token_BS[:, 1:]))
        for row, window in enumerate(windows):
            last = len(window.tokens) - 1
            targets = row, slice(last - window.num_targets, last)
            yield Scored(nll_BS[targets].astype(np.float64), is_top_BS[targets])


@functools.cache
def _make_score(config: Config) -> jax.stages.Wrapped:
    """`score(params, token_BS, label_BS)`: the nll of each label, and whether it is the most probable, on every device."""
    config = inference_config(config)
    loss, graph, vocab_size = Loss.of(config), model_graph(config), config.model.vocab_size

    @jax.jit
    def score(params: nnx.State, token_BS: jax.Array, label_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        token_BS, label_BS = (jax.reshard(x, layout.BATCH) for x in (token_BS, label_BS))
        model = nnx.merge(graph, params)
        x_BSD, head_DV = model.hidden(token_BS), model.head_VD.T
        length = token_BS.shape[1]
        parts = num_chunks(4 * token_BS.size // config.mesh.data * head_DV.shape[1] // config.mesh.model, length)

        def score_chunk(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_BCD, label_BC = (lax.dynamic_slice_in_dim(x, index * (length // parts), length // parts, 1) for x in (x_BSD, label_BS))
            logits_BCV = loss.logits(x_BCD, head_DV)
            return loss.per_token(logits_BCV, label_BC)[1], most_probable(logits_BCV, vocab_size) == label_BC

        def in_row(x_NBC: jax.Array) -> jax.Array:
            x_NBC = jax.reshard(x_NBC, layout.replicated(x_NBC))
            return jnp.moveaxis(x_NBC, 0, 1).reshape(label_BS.shape)

        nll_NBC, is_top_NBC = lax.map(score_chunk, jnp.arange(parts))
        return in_row(nll_NBC), in_row(is_top_NBC)

    return score
