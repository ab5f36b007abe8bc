"""Bytes that a training step needs on each GPU, line by line, counted without compiling.

The arrays that live between steps are counted exactly. The activations that a step keeps for its
backward pass are counted array by array, as in Korthikanti et al. (2022), "Reducing Activation
Recomputation in Large Transformer Models": `kept_by_layer` is their s b h (10 + 24/t) and more.
Temporary arrays are counted at the moments of a step that may need the most (`_moments`), and the
largest of these is the answer. The moments and their arrays were read from the buffers of programs
that XLA compiled for H100s; `benchmarks/plan_memory.py` compares the sums with
`compiled.memory_analysis()`.

t is the number of devices of the `model` axis.
"""

import dataclasses
from functools import cached_property
from math import prod

from megajax.config import Config
from megajax.counts.chunks import chunk_sizes
from megajax.counts.flops import uses_flash
from megajax.counts.parameters import own_counts
from megajax.parallel.layout import Layout

FLOAT32, MASK = 4, 1  # bytes of a number in fp32, and of an element of a dropout mask
BYTES = {'float32': FLOAT32, 'bfloat16': 2, 'float16': 2}  # bytes of a number in `train.dtype`
# The share of the temporary bytes that is lost between the arrays of XLA's heap: from nothing to
# 4 % in programs for H100s.
FRAGMENTS = 0.02
# The share of the count that a program for H100s needed beyond it at most, as
# tests/plan/test_compiled.py finds in the results.
UNDERCOUNT = 0.026


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes that a step holds at one moment, beside state and batch."""

    gradients: int = 0  # gradients in fp32; with several microbatches also their sum
    activations: int = 0  # arrays that the forward pass keeps for the backward pass
    logits: int = 0  # logits of one chunk of tokens, and their gradient
    buffers: int = 0  # arrays of the current layer, and copies in another dtype or layout

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return self.gradients + self.activations + self.logits + self.buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on each GPU at the moment of a step that needs the most."""

    parameters: int  # the master weights, in fp32
    optimizer: int  # AdamW's two moments, in fp32
    weights: int  # ZeRO-1: weights that a step gathers; else each product casts its own (buffers)
    gradients: int
    activations: int
    logits: int
    buffers: int
    fragments: int  # see FRAGMENTS
    batch: int
    moment: str  # loss, layout, backward or embedding, see `_moments`

    @property
    def state(self) -> int:
        """The bytes that live between steps."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """The bytes of everything."""
        held = self.gradients + self.activations + self.logits + self.buffers
        return self.state + self.weights + held + self.fragments + self.batch


def memory(config: Config, *, capacity_bytes: int | None = None) -> StepMemory:
    """Return the bytes that a step of `config` needs on each of its GPUs.

    XLA allocates all gradient buffers up front if they fit in `capacity_bytes`, otherwise late.
    """
    sizes = _Sizes(config)
    early = _memory(sizes, early=True)
    return (
        early
        if capacity_bytes is None or early.total <= capacity_bytes
        else _memory(sizes, early=False)
    )


def largest_microbatch(config: Config, capacity_bytes: int) -> int:
    """Return the most rows that a data shard can have in a microbatch; 0 if not even one fits."""
    step = 2 if config.train.overlap == 'batch_split' else 1  # batch-split overlap halves the rows

    def fits(rows: int) -> bool:
        batch_size = rows * step * config.mesh.data * config.train.microbatches
        train = config.train.model_copy(update={'batch_size': batch_size})
        return (
            memory(config.model_copy(update={'train': train}), capacity_bytes=capacity_bytes).total
            <= capacity_bytes
        )

    too_many = 1
    while fits(too_many):
        too_many *= 2
    least = too_many // 2
    while too_many - least > 1:
        middle = (least + too_many) // 2
        least, too_many = (middle, too_many) if fits(middle) else (least, middle)
    return least * step


def kept_by_layer(config: Config) -> int:
    """Return the bytes that a layer's forward pass keeps on each GPU without recomputation.

    For a GPT in 16 bits with dropout, and without its scores, they are s b h (10 + 24/t) as in
    Korthikanti et al. (2022), table 2. With sequence parallelism the paper has s b h 34/t, because
    Megatron gathers the inputs of products again; XLA keeps them: s b h (4 + 30/t). Without flash
    attention the scores are a s^2 b (4 + 2 + 1) rather than 5, because their softmax stays in fp32.
    """
    return _Sizes(config).kept_by_layer


def num_logit_chunks(config: Config) -> int:
    """Return the number of chunks that the loss splits a microbatch into (`model/loss.py`)."""
    return _logits(_Sizes(config))[0]


class _Sizes:
    """The bytes of a step's arrays and its numbers of parameters, on each GPU."""

    def __init__(self, config: Config):
        model, train, layout = config.model, config.train, Layout.of(config)
        shards = layout.num_shards
        self.config, self.model, self.layout = config, model, layout
        self.flash = uses_flash(config)
        self.is_masked = model.is_bert or config.data.document_mask
        self.itemsize = BYTES[train.dtype]
        self.tokens = config.microbatch_rows * train.seq_len
        self.is_scattered = shards('T') > 1

        self.matrices, self.parameters = own_counts(config)
        self.table = model.padded_vocab_size * model.hidden_size // shards('V')
        self.tables = (1 if model.tie_embeddings else 2) * self.table
        kept_apart = prod(layout.sizes_at_rest)
        self.at_rest = self.parameters - self.matrices + self.matrices // kept_apart

        of_tokens = self.itemsize * self.tokens
        self.whole = of_tokens * model.hidden_size  # the input of a column-parallel product
        self.residual = self.whole // shards('T')
        self.queries = of_tokens * model.num_heads * model.head_dim // shards('N')
        self.keys = of_tokens * max(model.num_kv_heads, shards('N')) * model.head_dim // shards('N')
        self.hidden = of_tokens * model.ffn_size // shards('F')
        self.up = (2 if model.activation == 'swiglu' else 1) * self.hidden
        # The number of scores, not their bytes.
        self.scores = self.tokens * train.seq_len * model.num_heads // shards('N')
        # JAX gives cuDNN the documents as a bias of the scores, one for all heads, and cuDNN
        # returns its gradient.
        self.mask = of_tokens * train.seq_len if self.is_masked else 0

    @cached_property
    def kept_by_layer(self) -> int:
        """The bytes that the function `kept_by_layer` returns."""
        around_norms = 2 * (self.residual + self.whole)
        heads = 2 * self.queries + 2 * self.keys  # queries, keys, values, the core's output
        heads += self.queries + self.keys if self.model.qk_norm else 0
        masks = 2 * MASK * self.residual // self.itemsize if self.model.dropout else 0
        return around_norms + heads + self.up + self.hidden + masks + self._kept_scores

    @property
    def _kept_scores(self) -> int:
        if self.flash or self.config.train.recompute == 'selective':
            return 0
        # The softmax, the same after dropout, and the mask.
        return self.scores * (FLOAT32 + self.itemsize + (MASK if self.model.dropout else 0))

    @cached_property
    def kept(self) -> int:
        """The bytes that all layers keep: with full recomputation only their inputs."""
        return self.model.num_layers * (
            self.residual if self.config.train.recompute == 'full' else self.kept_by_layer
        )

    @property
    def batch(self) -> int:
        """The bytes of tokens, labels and loss mask, and with document masks of what these need.

        For BERT also of segments and token types, and of each row's sentence order.
        """
        rows, length = self.config.microbatch_rows, self.config.train.seq_len
        of_row = (5 if self.is_masked else 3) * length + (1 if self.model.is_bert else 0)
        return 4 * of_row * rows * self.config.train.microbatches

    @property
    def gathered(self) -> int:
        """The bytes of the weights of a step with ZeRO-1, in `train.dtype`."""
        return self.itemsize * self.matrices


def _memory(sizes: _Sizes, *, early: bool) -> StepMemory:
    moments = _moments(sizes, early=early)
    moment = max(moments, key=lambda name: moments[name].total)
    weights = sizes.gathered if sizes.config.optim.shard else 0
    return StepMemory(
        parameters=FLOAT32 * sizes.at_rest,
        optimizer=2 * FLOAT32 * sizes.at_rest,
        weights=weights,
        fragments=int(FRAGMENTS * (weights + moments[moment].total)),
        batch=sizes.batch,
        moment=moment,
        **dataclasses.asdict(moments[moment]),
    )


def _moments(sizes: _Sizes, *, early: bool) -> dict[str, Held]:
    """Return what a step holds at the moments that may need the most.

    - loss: with the head's gradient and the arrays that it is computed from.
    - layout: between the passes, when XLA copies the arrays that the layers' loop has stacked to
      another layout, and may already have allocated the layers' gradients (`early`).
    - backward: in the backward pass of a layer.
    - embedding: at its end, in the gradient of the embedding. If the embedding is not the head,
      this gradient is written where the transposed head was, and that place stays empty until then.
    """
    table = FLOAT32 * sizes.table
    summed = FLOAT32 * sizes.parameters if sizes.config.train.microbatches > 1 else 0
    in_layers = FLOAT32 * (sizes.parameters - sizes.tables)
    gradients = summed + table + in_layers
    recomputed = sizes.kept_by_layer if sizes.config.train.recompute == 'full' else 0
    chunks, logits, dlogits = _logits(sizes)
    # Several chunks add up the head's gradient, and XLA transposes the head once for all of them.
    added, transposed = (table, table) if chunks > 1 else (0, 0)
    kept_free = 0 if sizes.model.tie_embeddings else transposed
    return {
        'loss': Held(
            gradients=summed + table,
            activations=sizes.kept,
            logits=max(logits, added) + dlogits,
            buffers=transposed + sizes.itemsize * sizes.table + sizes.residual,
        ),
        'layout': Held(
            gradients=gradients if early else gradients - in_layers,
            activations=sizes.kept,
            buffers=sizes.model.num_layers * _copied(sizes),
        ),
        'backward': Held(
            gradients=gradients,
            activations=sizes.kept,
            buffers=recomputed + _buffers_of_layer(sizes) + kept_free,
        ),
        'embedding': Held(
            gradients=gradients + table, buffers=FLOAT32 * sizes.whole // sizes.itemsize
        ),
    }


def _logits(sizes: _Sizes) -> tuple[int, int, int]:
    """Return the number of chunks (`model/loss.py`), and the bytes of logits of one chunk.

    The logits are in fp32; the third value is the bytes of their gradient.
    """
    length = sizes.config.train.seq_len // sizes.layout.num_shards('T')
    logits = FLOAT32 * sizes.tokens * sizes.model.padded_vocab_size // sizes.layout.num_shards('V')
    chunks, _ = chunk_sizes(logits, length)
    return chunks, logits // chunks, sizes.itemsize * logits // FLOAT32 // chunks


def _copied(sizes: _Sizes) -> int:
    """Return the bytes of the largest array of a layer whose stack XLA copies between the passes.

    It copies one stack after the other.
    """
    if sizes.config.train.recompute == 'full':
        return 0
    if not sizes.flash:  # to contract over queries where the forward pass contracts over keys
        return (
            sizes.queries if sizes.config.train.recompute == 'selective' else FLOAT32 * sizes.scores
        )
    if sizes.config.microbatch_rows == 1:
        return sizes.hidden
    # Gathered with the sequence dim before the rows.
    return sizes.whole if sizes.is_scattered else 0


def _buffers_of_layer(sizes: _Sizes) -> int:
    """Return the temporary bytes in the backward pass of a layer: in its MLP, or in its attention.

    XLA leaves the weights' gradients for last. So the gradients of both sublayers' outputs,
    unsharded, and the gradient of `up` live to the end.
    """
    mlp = 2 * sizes.up + sizes.hidden + 2 * sizes.whole
    outputs = 3 * sizes.queries  # attention's output, again for its gradient, and that gradient
    # Queries, keys and values, their gradients, and these gradients in one array.
    heads = 3 * (sizes.queries + 2 * sizes.keys)
    if sizes.flash:
        scores = 2 * sizes.mask
    else:
        scores = (4 if sizes.config.train.recompute == 'selective' else 2) * FLOAT32 * sizes.scores
    return max(mlp, sizes.up + outputs + heads + scores + 3 * sizes.whole)
