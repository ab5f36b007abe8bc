"""Score given tokens: the log-likelihood of each, and whether it is the most probable one."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from megajax.core.config import Config
from megajax.core.config.overlap_rules import without_order
from megajax.core.counts.chunks import chunk_sizes
from megajax.core.counts.prompts import padded_length
from megajax.core.model.arr_coc.relevance import question
from megajax.core.model.computation import Computation
from megajax.core.model.images import Images
from megajax.core.model.loss import Loss
from megajax.core.model.parameters import cast_matrices
from megajax.core.model.platform import is_on_cpu
from megajax.core.model.rows import Rows
from megajax.core.model.shard_copies import copy_to_shards
from megajax.core.model.transformer import LanguageModel, model_graph
from megajax.core.parallel.layout import Layout
from megajax.runtime.generate.image_prompts import PromptImages, pad, stack
from megajax.runtime.generate.prompt_images import SeenPrompts, see
from megajax.runtime.generate.sampling import most_probable
from megajax.runtime.generate.weights import inference_config
from megajax.xla.miscompiles import mesh_target, workarounds

ROWS = 8  # number of windows in a batch


class Window(NamedTuple):
    """Tokens of which the last `num_targets` are predicted, each from all tokens before it.

    A window has at most `max_seq_len` + 1 tokens.
    """

    tokens: Sequence[int] | np.ndarray
    num_targets: int
    # images of all tokens except the last; all windows have images, or none has
    images: PromptImages | None = None
    counts: np.ndarray | None = None  # with images: whether each target counts


class Scored(NamedTuple):
    """The scores of each target of a window."""

    nll: np.ndarray  # negative log-likelihood in nats
    is_top: np.ndarray  # whether no token is more probable


class Scorer:
    """A model that scores windows on the current mesh.

    The scores are the same on every mesh, except for the order of sums.
    """

    def __init__(self, config: Config, params: nnx.State):
        self.config, self.params = config, params
        self._score = _make_score(config, mesh_target())

    def __call__(self, windows: Iterable[Window]) -> Iterator[Scored]:
        """Yield the scores of each window, in order; a batch is padded to its longest window."""
        windows = iter(windows)
        while batch := list(islice(windows, self._rows)):
            yield from self._score_batch(batch)

    def in_any_order(self, windows: Sequence[Window]) -> list[Scored]:
        """Return the scores of each window, in order; batches have windows of similar lengths."""
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i].tokens))
        scored = dict(zip(order, self(windows[i] for i in order), strict=True))
        return [scored[i] for i in range(len(windows))]

    @property
    def _rows(self) -> int:
        return -(-ROWS // self.config.mesh.data) * self.config.mesh.data

    def _score_batch(self, windows: Sequence[Window]) -> Iterator[Scored]:
        longest = max(len(window.tokens) for window in windows) - 1
        length = padded_length(longest, self.config.model.max_seq_len)
        assert longest <= length
        token_BS = np.zeros((self._rows, length + 1), np.int32)
        for row, window in enumerate(windows):
            token_BS[row, : len(window.tokens)] = window.tokens
        nll_BS, is_top_BS = (
            np.asarray(x)
            for x in self._score(
                self.params, token_BS[:, :-1], token_BS[:, 1:], *self._images(windows, length)
            )
        )
        for row, window in enumerate(windows):
            last = len(window.tokens) - 1
            targets = row, slice(last - window.num_targets, last)
            yield Scored(nll_BS[targets].astype(np.float64), is_top_BS[targets])

    def _images(self, windows: Sequence[Window], length: int) -> tuple[Any, ...]:
        """Return images and positions of the windows' tokens, and whether each target counts."""
        padded = [pad(window.images, length) for window in windows if window.images is not None]
        if not padded:
            return ()
        count_BS = np.zeros((self._rows, length), bool)
        for row, window in enumerate(windows):
            if window.counts is not None:
                count_BS[row, : len(window.counts)] = window.counts
        return *stack(padded, self._rows, length), count_BS


def hidden_of_shards(
    model: LanguageModel,
    token_BS: jax.Array,
    images: Images,
    position_BS: jax.Array,
    count_BS: jax.Array,
    computation: Computation,
) -> jax.Array:
    """Return the result of the model's `hidden` for sequences with images, on all data shards."""
    layout = model.layout
    position_BS, count_BS, index_BS = (
        jax.reshard(x, layout('BS')) for x in (position_BS, count_BS, images.index_BS)
    )
    images = images._replace(is_question_BS=question(count_BS, index_BS))
    x_BSD = model.embed(token_BS, computation.dtype, Rows(position_BS))
    prompts = SeenPrompts(x_BSD, position_BS, jnp.ones_like(index_BS))
    prompts = see(model, prompts, images, layout)
    x_BSD, _ = model.blocks(prompts.x_BSD, computation, prompts.rows, seen=prompts.seen)
    return model.finish(x_BSD)


@functools.cache
def _make_score(config: Config, target: str) -> jax.stages.Wrapped:
    """Return the function `score(params, token_BS, label_BS, ...)`, compiled for a target.

    For sequences with images, `score` also takes the images, the positions of the tokens, [B, S] or
    [B, S, 3], and whether each label counts. Its results, replicated on every device, are the
    negative log-likelihood of each label, and whether it is the most probable.
    """
    config = inference_config(config)
    layout, computation = Layout.of(config), Computation.of(without_order(config))
    loss, graph = Loss.of(config, layout), model_graph(config.model, layout)

    @partial(jax.jit, compiler_options=workarounds(target))
    def score(
        params: nnx.State,
        token_BS: jax.Array,
        label_BS: jax.Array,
        images: Images | None = None,
        position_BS: jax.Array | None = None,
        count_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        token_BS, label_BS = (jax.reshard(x, layout('BS')) for x in (token_BS, label_BS))
        if layout.at_rest:
            params = cast_matrices(params, config.train.compute_dtype, layout)
        if images is None:
            model = nnx.merge(graph, params)
            x_BSD, _ = model.hidden(token_BS, computation)
        else:
            assert position_BS is not None
            assert count_BS is not None
            model = nnx.merge(graph, copy_to_shards(params, layout, encoder_only=True))
            x_BSD = hidden_of_shards(model, token_BS, images, position_BS, count_BS, computation)
        head_dV = model.head_Vd.T
        length = token_BS.shape[1]
        rows = token_BS.shape[0] // layout.num_shards('B')
        logit_bytes = 4 * rows * length * head_dV.shape[1] // layout.num_shards('V')
        count, size = chunk_sizes(logit_bytes, length, on_gpu=not is_on_cpu(x_BSD))
        padding = (0, 0), (0, count * size - length)
        x_BSD, labels_BS = jnp.pad(x_BSD, (*padding, (0, 0))), jnp.pad(label_BS, padding)

        def score_chunk(index: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_chunk, label_chunk = (
                lax.dynamic_slice_in_dim(x, index * size, size, 1) for x in (x_BSD, labels_BS)
            )
            logits_BSV = loss.logits(x_chunk, head_dV)
            nll = loss.per_token(logits_BSV, label_chunk)[1]
            return nll, most_probable(logits_BSV, config.model.vocab_size, layout) == label_chunk

        def in_rows(chunks: jax.Array) -> jax.Array:
            """Return chunks [chunk, B, tokens] as [B, S]."""
            chunks = jax.reshard(chunks, layout('---'))
            return jnp.moveaxis(chunks, 0, 1).reshape(labels_BS.shape)[:, :length]

        nll, is_top = lax.map(score_chunk, jnp.arange(count))
        return in_rows(nll), in_rows(is_top)

    return score
