"""The transformer (embedding, a stack of blocks, norm) and the two models that add heads to it."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import ModelConfig
from megajax.core.model.arr_coc.detail import Detail, detail_of
from megajax.core.model.arr_coc.relevance import RelevanceNetworks
from megajax.core.model.bert import MaskedHead, OrderHead
from megajax.core.model.block import Block, parts_of_rows
from megajax.core.model.computation import IN_FP32, Computation
from megajax.core.model.cross_attention import CrossAttention, Seen
from megajax.core.model.dropout import dropout, random_key
from megajax.core.model.embedding import (
    PositionEmbedding,
    TokenTypeEmbedding,
    VocabParallelEmbedding,
)
from megajax.core.model.fp8 import SCALES
from megajax.core.model.images import Images, Merged, merge_images
from megajax.core.model.loss import Loss
from megajax.core.model.norm import make_norm
from megajax.core.model.overlap.schedule import Schedule
from megajax.core.model.parameters import Parameters
from megajax.core.model.router import LOAD
from megajax.core.model.rows import NO_ROWS, Rows
from megajax.core.model.stack import run_layer, run_layers
from megajax.core.model.vision import Encoder
from megajax.core.parallel.layer_order import require_model_order
from megajax.core.parallel.layout import Layout

Module = TypeVar('Module')
# none of these numbers is an index by which a model's key is split
VISION, CROSS, RELEVANCE = 7, 8, 9


class Transformer(nnx.Module):
    """GPT-2, Llama, Qwen3 and Megatron's GPT and BERT without their heads.

    Parameters are fp32, created sharded on the current mesh (`jax.set_mesh`); their values are the
    same on every mesh.
    """

    # the head of a language model, unless it is tied to the embedding
    head: nnx.Param[jax.Array] | None = None

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        self.config, self.layout = config, layout
        parameters = Parameters.of(config, layout)
        embedding_key, position_key, layers_key, _ = jax.random.split(key, 4)
        self.embedding = VocabParallelEmbedding(
            parameters['embedding'], key=embedding_key, scale=config.embedding_scale
        )
        fold_in = partial(jax.random.fold_in, key)

        def maybe(name: str, make: Callable[..., Module], own_key: jax.Array) -> Module | None:
            return make(parameters[name], key=own_key) if name in parameters else None

        self.position = maybe('position', PositionEmbedding, position_key)
        self.token_type = maybe('token_type', TokenTypeEmbedding, _bert_keys(key)[0])
        self.layers = Block.stacked(config, parameters['layers'], key=layers_key)
        self.vision = None if config.vision is None else Encoder(config, key=fold_in(VISION))
        self.cross = maybe('cross', partial(CrossAttention, config), fold_in(CROSS))
        self.relevance = maybe('relevance', partial(RelevanceNetworks, config), fold_in(RELEVANCE))
        self.norm = make_norm(config, parameters['norm'])

    def embed(self, token_BS: jax.Array, dtype: str, rows: Rows = NO_ROWS) -> jax.Array:
        """Return the residual stream x_BTD before the first layer."""
        config = self.config
        with jax.named_scope('embedding'):
            vectors_BSD, dims = None, '-' if rows.position_BS is None else 'B'
            if self.position is not None:
                vectors_BSD = self.position(token_BS, rows.position_BS)
            if self.token_type is not None:
                types_BSD, dims = self.token_type(token_BS, rows.type_BS), 'B'
                vectors_BSD = types_BSD if vectors_BSD is None else vectors_BSD + types_BSD
            x_BTD = self.embedding(token_BS, jnp.dtype(dtype), vectors_BSD, dims)
            keys = rows.at_layer(config.num_layers).key_B
            return dropout(x_BTD, config.dropout, keys, self.layout('TD'))

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the final norm."""
        with jax.named_scope('norm'):
            return self.norm(x_BTD)

    def hidden(
        self,
        token_BS: jax.Array,
        computation: Computation,
        rows: Rows = NO_ROWS,
        *,
        images: Images | None = None,
        weights: 'Transformer | None' = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return x_BTD after the final norm, and the weight of the head."""
        require_model_order(self.layout)
        seen = None
        x_BTD = self.embed(token_BS, computation.dtype, rows)
        if images is not None:
            detail = self.detail(x_BTD, images)
            if self.cross is not None:
                assert self.vision is not None
                seen = self.cross.see(self.vision, images, rows.segment_BS, computation, detail)
            else:
                merged = self.with_images(x_BTD, images, computation, detail)
                x_BTD, rows = merged.x_BTD, merged.rows(rows)
        x_BTD, head_Vd = self.blocks(x_BTD, computation, rows, weights=weights, seen=seen)
        return self.finish(x_BTD), head_Vd

    def detail(self, x_BTD: jax.Array, images: Images) -> Detail | None:
        """Return the detail that relevance gives to images, or None without relevance."""
        if self.relevance is None or self.vision is None:
            return None
        return detail_of(self.relevance, self.vision.config, x_BTD, images, self.layout)

    def with_images(
        self, x_BTD: jax.Array, images: Images, computation: Computation, detail: Detail | None
    ) -> Merged:
        """Put the vectors of images in place of their tokens."""
        assert self.vision is not None
        return merge_images(self.vision, x_BTD, images, self.layout, computation.recompute, detail)

    def blocks(
        self,
        x_BTD: jax.Array,
        computation: Computation,
        rows: Rows = NO_ROWS,
        *,
        weights: 'Transformer | None' = None,
        first: jax.Array | int = 0,
        seen: Seen | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the residual stream after `self.layers`, and the weight of the head.

        Cross-attention layers are included. `weights` has the weights to compute with, if they
        differ from the parameters, and `first` is as in `run_layers`.
        """
        if computation.overlap.in_order:
            return self._in_order(x_BTD, computation, rows, weights, first)
        num_parts = computation.overlap.num_parts
        parts: list[Rows] = parts_of_rows(rows, num_parts)

        def run_block(
            block: Block, weights: Block | None, xs_BTD: tuple[jax.Array, ...], index: jax.Array
        ) -> tuple[jax.Array, ...]:
            block = computation.pair(weights, block, self.layout)
            return tuple(
                run_layer(block, x_BTD, of_part, index, computation)
                for x_BTD, of_part in zip(xs_BTD, parts, strict=True)
            )

        after_groups = None
        if seen is not None:
            assert self.cross is not None
            used = None if weights is None else weights.cross
            after_groups = self.cross.after_groups(seen, rows.key_B, computation, used)
        xs_BTD = tuple(parts_of_rows(x_BTD, num_parts))
        of_layers = None if weights is None else weights.layers
        with jax.named_scope('layers'):
            xs_BTD = run_layers(
                run_block,
                xs_BTD,
                self.layers,
                of_layers,
                first,
                recompute=computation.recompute,
                unroll=computation.overlap.unroll,
                after_groups=after_groups,
            )
        return xs_BTD[0] if num_parts == 1 else jnp.concatenate(xs_BTD), self.head_Vd

    def _in_order(
        self,
        x_BTD: jax.Array,
        computation: Computation,
        rows: Rows,
        weights: 'Transformer | None',
        first: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute what `blocks` does by the overlap schedule, which also gathers a sharded head."""
        schedule = Schedule(self.config, self.layout, computation)
        of_layers = None if weights is None else weights.layers
        at_rest = self.head_Vd if computation.overlap.has_head else None
        with jax.named_scope('layers'):
            x_BTD, head_Vd = schedule(x_BTD, self.layers, of_layers, rows, first, at_rest)
        return x_BTD, self.head_Vd if head_Vd is None else head_Vd

    @property
    def head_Vd(self) -> jax.Array:
        """The weight of the head: the embedding table if they are tied."""
        return self.embedding.table[...] if self.head is None else self.head[...]


class LanguageModel(Transformer):
    """A transformer with a head that predicts the next token."""

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        super().__init__(config, layout, key=key)
        parameters = Parameters.of(config, layout)
        head_key = jax.random.split(key, 4)[3]
        self.head = parameters.make('head', head_key) if 'head' in parameters else None

    def __call__(
        self,
        token_BS: jax.Array,
        computation: Computation = IN_FP32,
        *,
        position_BS: jax.Array | None = None,
        segment_BS: jax.Array | None = None,
        type_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Return logits [B, S, V] in fp32, sharded over V.

        The logits of the vocabulary's padding are the lowest fp32 number. `megajax.cross_entropy`
        compares them with labels. Raises ConfigError on meshes with pipeline stages or context
        shards.
        """
        rows = Rows(position_BS, segment_BS, type_BS)
        x_BTD, head_Vd = self.hidden(token_BS, computation, rows)
        x_BTD = self.before_head(x_BTD)
        with jax.named_scope('head'):
            x_BSD = jax.reshard(x_BTD, self.layout('BSd'))  # f: nothing (SP: all-gather)
            loss = Loss(vocab_size=self.config.vocab_size, layout=self.layout)
            return loss.logits(x_BSD, head_Vd.T, self.head_bias_V)

    @property
    def head_bias_V(self) -> jax.Array | None:
        """The bias that is added to the logits, if any."""
        return None

    def before_head(self, x_BTD: jax.Array) -> jax.Array:
        """Compute the input of the output projection from the result of `hidden`."""
        return x_BTD


class Bert(LanguageModel):
    """A transformer with BERT's heads: masked tokens, and sentence-order prediction."""

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        super().__init__(config, layout, key=key)
        parameters = Parameters.of(config, layout)
        _, masked_key, order_key = _bert_keys(key)
        self.masked_head = MaskedHead(config, parameters['masked_head'], key=masked_key)
        self.order_head = OrderHead(parameters['order_head'], key=order_key)

    def before_head(self, x_BTD: jax.Array) -> jax.Array:
        """Compute the input of the output projection from the result of `hidden`."""
        with jax.named_scope('head'):
            return self.masked_head(x_BTD)

    @property
    def head_bias_V(self) -> jax.Array | None:
        """The bias that is added to the logits, if any."""
        return self.masked_head.bias[...]


Decoder = LanguageModel  # name in the first release


def make_model(config: ModelConfig, layout: Layout, *, key: jax.Array) -> LanguageModel:
    """Make the model for `config.objective`."""
    kind = Bert if config.is_bert else LanguageModel
    return kind(config, layout, key=key)


def model_graph(config: ModelConfig, layout: Layout) -> nnx.GraphDef[LanguageModel]:
    """Return the model without its parameters, for `nnx.merge`."""
    return nnx.graphdef(abstract_model(config, layout))


def abstract_model(
    config: ModelConfig, layout: Layout, *, in_fp8: bool = False, is_routed: bool = False
) -> LanguageModel:
    """Return the model with only the shapes of its parameters.

    With `in_fp8`, its layers also have scales; with `is_routed`, its routers have their load.
    """

    def make() -> LanguageModel:
        model = make_model(config, layout, key=random_key(0))
        for sublayer in (model.layers.attention, model.layers.mlp) if in_fp8 else ():
            sublayer.first.scales, sublayer.second.scales = (
                nnx.Param(None, declared=SCALES) for _ in range(2)
            )
        if is_routed:
            model.layers.experts.router.load = nnx.Param(None, declared=LOAD)
        return model

    return jax.eval_shape(make)


def _bert_keys(key: jax.Array) -> jax.Array:
    return jax.random.split(jax.random.fold_in(key, 4), 3)
