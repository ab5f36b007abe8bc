"""Count the bytes of a training step's arrays on each GPU, one by one.

With 2-D tensor parallelism (`mesh.model_rows`), arrays between the two matmuls of a sublayer shard
the batch over `row`, and arrays before and after them shard D over it (`core/parallel/layout.py`).
"""

import functools
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from megajax.analysis.plan.layer_memory import LayerArrays
from megajax.core.config import Config, ModelConfig
from megajax.core.counts.chunks import chunk_sizes
from megajax.core.counts.context import kept_of_halos
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.flash import HOPPER, uses_flash
from megajax.core.counts.layers import stacks
from megajax.core.counts.parameters import (
    BYTES,
    Counts,
    count,
    dim_sizes,
    elements,
    num_at_rest,
    parameters,
)
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.counts.windows import scored_keys
from megajax.core.hardware.records import Capability
from megajax.core.parallel.layout import Layout

FLOAT32, MASK = 4, 1  # bytes of an fp32 number, and of an element of a dropout mask


class Savings(NamedTuple):
    """Ways to save memory that other software has and megajax does not."""

    moments_in_8_bits: bool = False  # AdamW's moments of matrices (`optim.kind=adamw`)
    activations_on_host: bool = False  # what the layers save for the backward pass


NO_SAVINGS = Savings()
# Bytes of a moment in blocks of 256 elements, which share an fp32 scale (Dettmers et al., 2021):
# `AdamW8bit` of bitsandbytes and torchao.
IN_8_BITS = 1 + 4 / 256


class Sizes:
    """The bytes of a step's arrays and its numbers of parameters, on each GPU."""

    def __init__(
        self,
        config: Config,
        capability: Capability | None = HOPPER,
        savings: Savings = NO_SAVINGS,
    ):
        model, train, layout = config.model, config.train, Layout.of(config)
        # The numbers of shards of D, of the heads, and of the tokens between sublayers.
        by_width, by_head, by_token = map(layout.num_shards, 'DNT')
        self.config, self.model, self.layout, self.savings = config, model, layout, savings
        self.capability, self.flash = capability, uses_flash(config, capability)
        self.is_masked = model.is_bert or config.data.document_mask
        self.itemsize = BYTES[train.dtype]
        self.chunk_layers = layers_of_chunk(config, layout)
        self.layers = self.chunk_layers * layout.chunks  # layers of a stage
        self.length = train.seq_len // layout.num_shards('S')  # tokens of a sequence on one device
        self.tokens = config.microbatch_rows * self.length
        self.is_scattered = by_token > 1
        self.overlap = config.overlap
        self.sums_early = self.overlap.shard in ('gradients', 'weights')
        self.is_ordered = self.overlap.in_order and self.overlap.unroll

        self.at_rest = at_rest(model, layout)
        self.matrices, self.parameters = self.at_rest.in_step.matrices, self.at_rest.in_step.all
        self.learned = self.at_rest.learned_in_step
        self.table = model.padded_vocab_size * model.hidden_size // layout.num_shards('V')
        self.num_tables = 1 if model.tie_embeddings else 2
        self.tables = self.num_tables * self.table
        self.learned_tables = 0 if model.is_decoder_frozen else self.num_tables

        widths, ((attention, _), *networks) = dim_sizes(model), stacks(model)
        of_tokens = self.itemsize * self.tokens
        self.between = self.tokens // by_width * self.itemsize  # tokens between two matmuls
        # The input of a column-parallel matmul.
        self.whole = of_tokens * model.hidden_size // by_width
        self.residual = self.whole // by_token
        self.queries = self.between * elements(attention.second.inputs, widths, layout.shards)
        self.keys = self.between * max(model.num_kv_heads, by_head) * widths['H'] // by_head
        # The inputs of the row-parallel matmuls; in 2-D they are gathered over `row`.
        self.heads = self.queries * by_width
        # The number of scores (not bytes) of a layer: on average, and in the layer that has the
        # most.
        self.scores = self.most_scores = 0
        # A shard that exchanges heads attends with a part of them to all tokens.
        shards_of_heads = config.mesh.context if config.mesh.exchanges_heads else 1
        attended = self.length * shards_of_heads
        if not self.flash:
            queries = self.tokens // by_width * model.num_heads
            mean, most = scored_keys(model, attended)
            self.scores = int(queries * mean) // by_head
            self.most_scores = queries * most // by_head
        # JAX passes the documents to cuDNN as a bias of the scores, shared by all heads, and cuDNN
        # returns the gradient of this bias.
        self.mask = self.between * shards_of_heads * attended if self.is_masked else 0
        # The layers with an MLP, and with experts, if the model has any.
        self.kinds = [LayerArrays(self, stack) for stack in networks]
        self.experts = self.kinds[-1].experts  # the last kind has experts, if any has

    @property
    def kept_by_layer(self) -> int:
        """Return the bytes of `memory.kept_by_layer`."""
        return max([kind.kept for kind in self.kinds])

    @property
    def kept_by_chunk(self) -> int:
        """Return the bytes that the forward pass of a chunk of layers saves, all of them."""
        return sum([kind.count * kind.kept for kind in self.kinds])

    @cached_property
    def kept_around(self) -> int:
        """Return the bytes that a layer saves outside its MLP, or its experts."""
        around_norms = self.model.norms_of_layer * self.residual + 2 * self.whole
        heads = self.queries + 2 * self.keys + self.heads  # queries, keys, values, core's output
        heads += int(2 * self.keys * kept_of_halos(self.config) / self.length)
        heads += self.queries + self.keys if self.model.qk_norm else 0
        # The attention output before it is gathered.
        heads += self.queries if self.layout.num_shards('D') > 1 else 0
        masks = 2 * MASK * self.residual // self.itemsize if self.model.dropout else 0
        return around_norms + heads + masks + self._kept_scores

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

        The overlap schedule also saves outputs that a norm reads. If activations are in host
        memory, the GPU has two layers' activations: one layer computes, the other's are sent.
        """
        share = min(1.0, 2 / self.layers) if self.savings.activations_on_host else 1
        if self.config.train.recompute != 'full':
            return int(share * self.layout.chunks * self.kept_by_chunk)
        keeps_outputs = self.model.norms_outputs and not self.overlap.repeats_outputs
        return int(share * self.layers * self.residual * (2 if keeps_outputs else 1))

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
        """Return the bytes of the matrices that a step first gathers over `data`, or casts once.

        FSDP keeps the weights of a pipeline stage gathered for all microbatches.
        """
        is_cast_once = self.is_ordered and self.itemsize < 4 and self.config.lora is None
        matrices = {'none': self.matrices - self.tables if is_cast_once else 0}
        if self.config.mesh.stages == 1:
            matrices['weights'] = self.at_rest.early
        return self.itemsize * matrices.get(self.config.optim.shard, self.matrices)

    @property
    def moments(self) -> int:
        """Return the bytes of the optimizer's moments."""
        optim = self.config.optim
        second = self.at_rest.learned - (self.at_rest.momenta if optim.kind == 'muon' else 0)
        if self.savings.moments_in_8_bits:
            return 2 * int(
                IN_8_BITS * self.at_rest.learned_matrices
                + FLOAT32 * (self.at_rest.learned - self.at_rest.learned_matrices)
            )
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
        """Return the bytes of the largest stack of a chunk that XLA copies between the passes.

        It copies one stack at a time.
        """
        recompute, layers = self.config.train.recompute, self.chunk_layers
        if recompute == 'full' or self.savings.activations_on_host:
            return 0
        # Copied to contract over queries, where the forward pass contracts over keys.
        if not self.flash:
            return layers * (self.queries if recompute == 'selective' else FLOAT32 * self.scores)
        if self.config.microbatch_rows == 1:
            return max([kind.count * kind.hidden for kind in self.kinds])
        # The gathered array has the sequence dim before the batch dim.
        return layers * self.whole if self.is_scattered else 0

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
        of_target = {
            'qkv': self.queries + 2 * self.keys,
            'out': self.whole,
            'up': max(kind.up for kind in self.kinds),
            'down': self.whole,
        }
        added = max(of_target[target] for target in self.config.lora.targets)
        return added + (self.itemsize * self.table if is_made_once else 0)


class AtRest(NamedTuple):
    """Numbers of parameters of a GPU, stored between steps (with padding) and in a step."""

    all: int
    layers: int  # parameters of all layers
    inputs: int  # parameters of the layers' matrices that ZeRO-3 copies: row-parallel, experts'
    table: int
    early: int  # parameters of the matrices that ZeRO-3 gathers at the start of a step
    # By the first dim of a stack of layers: parameters of the matrices of one layer in a step, and
    # of all its parameters, as stored.
    of_layer: Mapping[str, int]
    of_stack: Mapping[str, int]
    learned: int  # parameters of `all` that are not frozen
    learned_layers: int  # parameters of `layers` that are not frozen
    learned_matrices: int  # parameters in the matrices of `learned`
    frozen_matrices: int  # parameters in the frozen matrices of `all`
    momenta: int  # parameters of `learned` without a second moment, because Muon trains them
    in_step: Counts  # parameters as sharded in the computation of a step
    learned_in_step: int  # those that are not frozen


@functools.cache
def at_rest(model: ModelConfig, layout: Layout) -> AtRest:
    """Count the parameters of a GPU."""
    sizes = dim_sizes(model)
    counts = {name: (x, num_at_rest(x, model, layout)) for name, x in parameters(model)}
    matrices = [(x, size) for x, size in counts.values() if x.is_matrix]
    shards = tuple(layout.shards.items())
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
        of_layer=_by_stack(
            (x, elements(x.dims_of_layer, sizes, layout.shards))
            for x, _ in matrices
            if x.is_stacked and 'J' not in x.dims
        ),
        of_stack=_by_stack(pair for pair in counts.values() if pair[0].is_stacked),
        learned=sum(size for x, size in counts.values() if not x.is_frozen),
        learned_layers=sum(size for x, size in counts.values() if x.is_stacked and not x.is_frozen),
        learned_matrices=sum(size for x, size in matrices if not x.is_frozen),
        frozen_matrices=sum(size for x, size in matrices if x.is_frozen),
        momenta=sum(size for x, size in matrices if x.is_layer_matrix and not x.is_frozen),
        in_step=count(model, shards),
        learned_in_step=count(model, shards, learned=True).all,
    )


def _by_stack(sizes: Iterable[tuple[Parameter, int]]) -> Mapping[str, int]:
    """Return the sums of sizes by the first dim of their parameters; cross-attention's is L."""
    sums = dict.fromkeys('LΔΛ', 0)
    for parameter, size in sizes:
        sums[parameter.dims[0].replace('J', 'L')] += size
    return sums
