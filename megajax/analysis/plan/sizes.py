"""Count the bytes of a training step's arrays on each GPU, one by one.

With 2-D tensor parallelism (`mesh.model_rows`), arrays between the two matmuls of a sublayer shard
the batch over `row`, and arrays before and after them shard D over it (`core/parallel/layout.py`).
"""

import functools
from functools import cached_property
from typing import NamedTuple

from megajax.analysis.plan.expert_memory import ExpertArrays
from megajax.core.config import Config, ModelConfig
from megajax.core.counts.chunks import chunk_sizes
from megajax.core.counts.context import kept_of_halos
from megajax.core.counts.flash import HOPPER, uses_flash
from megajax.core.counts.layers import layer
from megajax.core.counts.parameters import (
    dim_sizes,
    elements,
    num_at_rest,
    own_counts,
    parameters,
)
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.counts.windows import scored_keys
from megajax.core.hardware.records import Capability
from megajax.core.parallel.layout import Layout

FLOAT32, MASK = 4, 1  # bytes of an fp32 number, and of an element of a dropout mask
BYTES = {
    'float32': FLOAT32,
    'bfloat16': 2,
    'float16': 2,
    'fp8': 2,
}  # bytes of a number in `train.dtype`


class Sizes:
    """The bytes of a step's arrays and its numbers of parameters, on each GPU."""

    def __init__(self, config: Config, capability: Capability | None = HOPPER):
        model, train, layout = config.model, config.train, Layout.of(config)
        shards = layout.num_shards
        self.config, self.model, self.layout = config, model, layout
        self.capability, self.flash = capability, uses_flash(config, capability)
        self.is_masked = model.is_bert or config.data.document_mask
        self.itemsize = BYTES[train.dtype]
        self.chunk_layers = layers_of_chunk(config)
        self.layers = self.chunk_layers * layout.chunks  # layers of a stage
        self.length = train.seq_len // shards('S')  # tokens of a sequence on one device
        self.tokens = config.microbatch_rows * self.length
        self.is_scattered = shards('T') > 1
        self.overlap = config.overlap
        self.sums_early = self.overlap.shard in ('gradients', 'weights')
        self.is_ordered = self.overlap.in_order and self.overlap.unroll

        self.counts = own_counts(config)
        self.matrices, self.parameters = self.counts.matrices, self.counts.all
        self.table = model.padded_vocab_size * model.hidden_size // shards('V')
        self.num_tables = 1 if model.tie_embeddings else 2
        self.tables = self.num_tables * self.table
        self.at_rest = at_rest(config.model, layout)
        self.learned = own_counts(config, learned=True).all
        self.learned_tables = 0 if model.is_decoder_frozen else self.num_tables

        widths, (attention, mlp) = dim_sizes(model), layer(model)
        of_tokens = self.itemsize * self.tokens
        between = self.tokens // shards('D') * self.itemsize  # tokens between two matmuls
        # The input of a column-parallel matmul.
        self.whole = of_tokens * model.hidden_size // shards('D')
        self.residual = self.whole // shards('T')
        self.queries = between * elements(attention.second.inputs, widths, layout.shards)
        self.keys = between * max(model.num_kv_heads, shards('N')) * widths['H'] // shards('N')
        # The inputs of the row-parallel matmuls; in 2-D they are gathered over `row`.
        self.heads = self.queries * shards('D')
        self.hidden = of_tokens * elements(mlp.second.inputs, widths, layout.shards)
        self.up = between * elements(mlp.first.outputs, widths, layout.shards)
        self.experts = ExpertArrays.of(config, layout, self.tokens, self.itemsize)
        if self.experts is not None:
            self.hidden, self.up = self.experts.hidden, self.experts.up
        # The number of scores (not bytes) of a layer: on average, and in the layer that has the
        # most.
        self.scores = self.most_scores = 0
        # A shard that exchanges heads attends with a part of them to all tokens.
        shards_of_heads = config.mesh.context if config.mesh.exchanges_heads else 1
        attended = self.length * shards_of_heads
        if not self.flash:
            queries = self.tokens // shards('D') * model.num_heads
            mean, most = scored_keys(model, attended)
            self.scores = int(queries * mean) // shards('N')
            self.most_scores = queries * most // shards('N')
        # JAX passes the documents to cuDNN as a bias of the scores, shared by all heads, and cuDNN
        # returns the gradient of this bias.
        self.mask = between * shards_of_heads * attended if self.is_masked else 0

    @cached_property
    def kept_by_layer(self) -> int:
        """Return the bytes of `memory.kept_by_layer`."""
        around_norms = self.model.norms_of_layer * self.residual + 2 * self.whole
        heads = self.queries + 2 * self.keys + self.heads  # queries, keys, values, core's output
        heads += int(2 * self.keys * kept_of_halos(self.config) / self.length)
        heads += self.queries + self.keys if self.model.qk_norm else 0
        # The attention output before it is gathered.
        heads += self.queries if self.layout.num_shards('D') > 1 else 0
        masks = 2 * MASK * self.residual // self.itemsize if self.model.dropout else 0
        kept = around_norms + heads + masks + self._kept_scores
        if self.experts is None:
            return kept + self.up + self.hidden
        return kept - self.whole + self.residual + self.experts.kept

    @property
    def _kept_scores(self) -> int:
        is_sharded = self.config.mesh.context > 1  # context shards save no scores
        if self.flash or is_sharded or self.config.train.recompute == 'selective':
            return 0
        # The softmax, the softmax after dropout, and the dropout mask.
        mask = MASK if self.model.attention_dropout else 0
        return self.scores * (FLOAT32 + self.itemsize + mask)

    @cached_property
    def kept(self) -> int:
        """Return the bytes that all layers save; with full recomputation, only their inputs.

        The overlap schedule also saves outputs that a norm reads.
        """
        if self.config.train.recompute != 'full':
            return self.layers * self.kept_by_layer
        keeps_outputs = self.model.norms_outputs and not self.overlap.repeats_outputs
        return self.layers * self.residual * (2 if keeps_outputs else 1)

    @property
    def batch(self) -> int:
        """Return the bytes of tokens, labels and loss mask, and of the inputs of document masks.

        BERT adds segments, token types and the sentence order of each sequence; an image encoder
        adds the images, and the indices and positions of their tokens.
        """
        rows, length = self.config.microbatch_rows, self.length
        of_row = (5 if self.is_masked else 3) * length + (1 if self.model.is_bert else 0)
        pixels, vision = 0, self.config.vision
        if vision is not None:
            pixels = vision.images * vision.max_patches * vision.pixels
            of_row += length * (4 if self.model.position == 'mrope' else 1) + 2 * vision.images
        return (4 * of_row + pixels) * rows * self.config.train.microbatches

    @property
    def parameters_at_rest(self) -> int:
        """Return the bytes of the stored parameters; all are fp32, unless there are adapters."""
        narrower = FLOAT32 - self.itemsize if self.config.lora else 0
        return FLOAT32 * self.at_rest.all - narrower * self.at_rest.frozen_matrices

    @property
    def gathered(self) -> int:
        """Return the bytes of the matrices that a step first gathers over `data`, or casts once."""
        is_cast_once = self.is_ordered and self.itemsize < 4 and self.config.lora is None
        cast_once = self.matrices - self.tables if is_cast_once else 0
        matrices = {'none': cast_once, 'weights': self.at_rest.early}
        return self.itemsize * matrices.get(self.config.optim.shard, self.matrices)

    @property
    def layer_weights(self) -> int:
        """Return the bytes of the matrices of one layer, in `train.dtype`."""
        return self.itemsize * self.at_rest.layer

    @property
    def moments(self) -> int:
        """Return the bytes of the optimizer's moments."""
        optim = self.config.optim
        second = self.at_rest.learned - (self.at_rest.momenta if optim.kind == 'muon' else 0)
        return BYTES[optim.moments_dtype] * (self.at_rest.learned + second)

    @cached_property
    def logits(self) -> tuple[int, int, int]:
        """Return the number of chunks of the loss, the bytes of a chunk's logits and of their
        gradient (`core/model/loss.py`).

        The logits are in fp32. Each pipeline stage has a share of the tokens of all sequences.
        """
        scattered, tokens = self.layout.num_shards('T'), self.tokens
        length = self.length // scattered
        if self.config.mesh.stages > 1:
            length = -(-tokens // scattered // self.config.mesh.stages)
            tokens = length * scattered
        logits = FLOAT32 * tokens * self.model.padded_vocab_size
        logits //= self.layout.num_shards('V')
        chunks, _ = chunk_sizes(logits, length, on_gpu=True)
        return chunks, logits // chunks, self.itemsize * logits // FLOAT32 // chunks

    @property
    def copied(self) -> int:
        """Return the bytes of a layer in the largest stack that XLA copies between the passes.

        It copies one stack at a time.
        """
        recompute = self.config.train.recompute
        if recompute == 'full':
            return 0
        # Copied to contract over queries, where the forward pass contracts over keys.
        if not self.flash:
            return self.queries if recompute == 'selective' else FLOAT32 * self.scores
        if self.config.microbatch_rows == 1:
            return self.hidden
        # The gathered array has the sequence dim before the batch dim.
        return self.whole if self.is_scattered else 0

    @property
    def buffers_of_layer(self) -> int:
        """Return the temporary bytes in the backward pass of a layer: of its MLP or its attention.

        XLA computes the weights' gradients last, unless they are reduced over `data` in the layer.
        The unsharded gradients of both sublayers' outputs, and of `up`, therefore live to the end.
        """
        mlp = 2 * self.up + self.hidden + 2 * self.whole
        if self.experts is not None:
            mlp = self.experts.in_backward + 2 * self.whole
        # Attention's output, its gradient, and the input of the matmul after it.
        outputs = 2 * self.queries + self.heads
        # Queries, keys and values, their gradients, and these gradients in one array.
        heads = 3 * (self.queries + 2 * self.keys)
        if self.flash:
            scores = 2 * self.mask
        else:
            recomputed = self.config.train.recompute == 'selective'
            scores = (4 if recomputed else 2) * FLOAT32 * self.most_scores
        return max(mlp, self.up + outputs + heads + scores + 3 * self.whole)

    @property
    def of_adapters(self) -> int:
        """Return the bytes that adapters add in the layers.

        They are the output of the largest adapter before it is added and, if there are several
        microbatches, the transposed head: because it is frozen, XLA transposes it once for all
        microbatches. With pipeline stages or sequence parallelism, the head is read in its stored
        layout.
        """
        if self.config.lora is None:
            return 0
        is_read_as_stored = self.config.mesh.stages > 1 or self.is_scattered
        is_made_once = self.config.train.microbatches > 1 and not is_read_as_stored
        return self.up + (self.itemsize * self.table if is_made_once else 0)

    @property
    def of_period(self) -> int:
        """Return the bytes that a loop over periods of a pattern needs beyond a loop over layers.

        With full recomputation, the backward pass copies the weights of a period, and stores the
        gradients of two more layers. It also copies the weights of the layers left over after the
        last period, whose gradients wait for the loop. Otherwise the weights of all layers in the
        loop are copied, and the gradients of all outputs of a period exist at once. XLA unrolls a
        single period.
        """
        if not self.model.layers or self.is_ordered:
            return 0
        period = len(self.model.pattern)
        if period == 1 or self.chunk_layers < 2 * period:
            return 0
        if self.config.train.recompute == 'full':
            left_over, gradients = self.chunk_layers % period, FLOAT32 * self.at_rest.layer
            copied = (period + left_over) * self.copied_weights
            return copied + (2 + left_over) * gradients
        outputs = self.up + self.queries + 2 * self.keys + 2 * FLOAT32 * self.whole // self.itemsize
        whole = self.chunk_layers // period * period
        return whole * self.copied_weights + (period - 1) * outputs

    @property
    def copied_weights(self) -> int:
        """Return the bytes of a layer's weights as a loop over periods copies them."""
        layer = self.at_rest.layer
        return {
            'none': FLOAT32 * layer,
            'weights': FLOAT32 * self.at_rest.layers // self.model.num_layers,
        }.get(self.config.optim.shard, self.itemsize * layer)


class AtRest(NamedTuple):
    """Numbers of parameters of a GPU, stored between steps (with padding) and in a step."""

    all: int
    layers: int  # parameters of all layers
    inputs: int  # parameters of the layers' matrices that ZeRO-3 copies: row-parallel, experts'
    table: int
    early: int  # parameters of the matrices that ZeRO-3 gathers at the start of a step
    layer: int  # parameters of the matrices of one layer in a step
    learned: int  # parameters of `all` that are not frozen
    learned_layers: int  # parameters of `layers` that are not frozen
    frozen_matrices: int  # parameters in the frozen matrices of `all`
    momenta: int  # parameters of `learned` without a second moment, because Muon trains them


@functools.cache
def at_rest(model: ModelConfig, layout: Layout) -> AtRest:
    """Count the parameters of a GPU."""
    sizes = dim_sizes(model)
    counts = {name: (x, num_at_rest(x, model, layout)) for name, x in parameters(model)}
    matrices = [(x, size) for x, size in counts.values() if x.is_matrix]
    return AtRest(
        all=sum(size for _, size in counts.values()),
        layers=sum(size for x, size in counts.values() if x.is_stacked),
        inputs=sum(
            size
            for x, size in matrices
            if x.is_stacked
            and (
                size < elements(x.dims, sizes, layout.shards)
                if x.is_of_experts
                else x.inputs != 'D'
            )
        ),
        table=counts['embedding.table'][1],
        early=sum(elements(x.dims, sizes, layout.shards) for x, _ in matrices if x.summed),
        layer=sum(
            elements(x.dims_of_layer, sizes, layout.shards)
            for x, _ in matrices
            if x.dims.startswith('L')
        ),
        learned=sum(size for x, size in counts.values() if not x.is_frozen),
        learned_layers=sum(size for x, size in counts.values() if x.is_stacked and not x.is_frozen),
        frozen_matrices=sum(size for x, size in matrices if x.is_frozen),
        momenta=sum(size for x, size in matrices if x.is_layer_matrix and not x.is_frozen),
    )
