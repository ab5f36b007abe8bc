"""The transformer (embedding, a stack of blocks, norm) and the two models that add heads to it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import Config, ModelConfig
from megajax.model.attention import attention_core
from megajax.model.bert import MaskedHead, OrderHead
from megajax.model.block import Block
from megajax.model.dropout import dropout, fold_in
from megajax.model.embedding import PositionEmbedding, TokenTypeEmbedding, VocabParallelEmbedding
from megajax.model.gradient_slot import pair
from megajax.model.loss import Loss
from megajax.model.norm import make_norm
from megajax.model.parameters import Parameters
from megajax.parallel.layout import Layout

Carry = Any  # what one layer passes to the next: the residual stream, or one per part of the rows
LayerFn = Callable[[Block, Carry, jax.Array], Carry]  # (block, carry, index of the layer) -> carry


class Computation(NamedTuple):
    """The settings of a forward and backward pass, which no parameter depends on."""

    dtype: str = 'float32'
    recompute: str = 'none'  # in the backward pass: none, selective (attention's core) or full
    num_parts: int = (
        1  # parts of the rows, independent within a layer: batch-split overlap (Domino)
    )

    @classmethod
    def of(cls, config: Config) -> Self:
        """The computation of a run's config, with the rows of a microbatch in one part."""
        return cls(config.train.dtype, config.train.recompute)


IN_FP32 = Computation()


class Transformer(nnx.Module):
    """GPT-2, Llama, Qwen3 and Megatron's GPT and BERT without their heads.

    Parameters are fp32, created sharded on the current mesh (`jax.set_mesh`); their values are the
    same on every mesh.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, key: jax.Array):
        self.config, self.layout = config, layout
        parameters = Parameters.of(config, layout)
        embedding_key, position_key, layers_key, _ = jax.random.split(key, 4)
        self.embedding = VocabParallelEmbedding(parameters['embedding'], key=embedding_key)
        type_key, *_ = _bert_keys(key)
        learned, typed = 'position' in parameters, 'token_type' in parameters
        self.position = (
            PositionEmbedding(parameters['position'], key=position_key) if learned else None
        )
        self.token_type = (
            TokenTypeEmbedding(parameters['token_type'], key=type_key) if typed else None
        )

        def make_block(key: jax.Array) -> Block:
            return Block(config, parameters['layers'], key=key)

        self.layers = jax.vmap(make_block)(jax.random.split(layers_key, config.num_layers))
        self.norm = make_norm(config, parameters['norm'])

    def embed(
        self,
        token_BS: jax.Array,
        dtype: str,
        *,
        position_BS: jax.Array | None = None,
        type_BS: jax.Array | None = None,
        key_B: jax.Array | None = None,
    ) -> jax.Array:
        """The residual stream x_BTD before the first layer; `key_B` turns dropout on."""
        config = self.config
        with jax.named_scope('embedding'):
            vectors_BSD, rows = None, '-' if position_BS is None else 'B'
            if self.position is not None:
                vectors_BSD = self.position(token_BS, position_BS)
            if self.token_type is not None:
                types_BSD, rows = self.token_type(token_BS, type_BS), 'B'
                vectors_BSD = types_BSD if vectors_BSD is None else vectors_BSD + types_BSD
            x_BTD = self.embedding(token_BS, jnp.dtype(dtype), vectors_BSD, rows)
            keys = fold_in(key_B, config.num_layers)
            return dropout(x_BTD, config.dropout, keys, self.layout('TD'))

    def run_layers(self, x: Carry, layer_fn: LayerFn, *, weights: Block | None = None) -> Carry:
        """Apply `layer_fn` to every block in turn, in a loop that is compiled once.

        Return the last carry. Where `self.layers` holds gradient slots (`gradient_slot.py`),
        `weights` are the layers' weights in the compute dtype.
        """

        def layer(x: Carry, layer: tuple[Block, Block | None, jax.Array]) -> tuple[Carry, None]:
            block, weights, index = layer
            return layer_fn(block if weights is None else pair(weights, block), x, index), None

        with jax.named_scope('layers'):
            indices = jnp.arange(self.config.num_layers)
            return lax.scan(layer, x, (self.layers, weights, indices))[0]

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the final norm."""
        with jax.named_scope('norm'):
            return self.norm(x_BTD)

    def hidden(
        self,
        token_BS: jax.Array,
        computation: Computation,
        *,
        position_BS: jax.Array | None = None,
        segment_BS: jax.Array | None = None,
        type_BS: jax.Array | None = None,
        key_B: jax.Array | None = None,
        weights: Block | None = None,
    ) -> jax.Array:
        """x_BTD after the final norm; `key_B` (see `dropout.sequence_keys`) turns dropout on."""
        num_parts = computation.num_parts
        rows = position_BS, segment_BS, key_B
        parts = [
            jax.tree.map(lambda x, i=i: _part(x, i, num_parts), rows) for i in range(num_parts)
        ]

        def run_block(
            block: Block, xs_BTD: tuple[jax.Array, ...], index: jax.Array
        ) -> tuple[jax.Array, ...]:
            outputs = []
            for x_BTD, (position, segment, key) in zip(xs_BTD, parts, strict=True):
                keys = fold_in(key, index)
                core = attention_core(
                    self.config,
                    self.layout,
                    recompute=computation.recompute == 'selective',
                    segment_BS=segment,
                    key_B=fold_in(keys, 0),
                )
                outputs.append(block(x_BTD, core, position_BS=position, key_B=keys)[0])
            return tuple(outputs)

        if computation.recompute == 'full':
            run_block = jax.checkpoint(run_block, prevent_cse=False)
        x_BTD = self.embed(
            token_BS, computation.dtype, position_BS=position_BS, type_BS=type_BS, key_B=key_B
        )
        xs_BTD = tuple(_part(x_BTD, i, num_parts) for i in range(num_parts))
        xs_BTD = self.run_layers(xs_BTD, run_block, weights=weights)
        return self.finish(xs_BTD[0] if num_parts == 1 else jnp.concatenate(xs_BTD))


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
        """Logits [B, S, V] in fp32, sharded over V.

        The logits of the vocabulary's padding are the lowest fp32 number.
        """
        x_BTD = self.hidden(
            token_BS,
            computation,
            position_BS=position_BS,
            segment_BS=segment_BS,
            type_BS=type_BS,
        )
        x_BTD = self.before_head(x_BTD)
        with jax.named_scope('head'):
            x_BSD = jax.reshard(x_BTD, self.layout('BSD'))  # f: nothing (SP: all-gather)
            loss = Loss(vocab_size=self.config.vocab_size, layout=self.layout)
            return loss.logits(x_BSD, self.head_VD.T, self.head_bias_V)

    @property
    def head_VD(self) -> jax.Array:
        """The weight of the head: the embedding table where they are tied."""
        return self.embedding.table[...] if self.head is None else self.head[...]

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


Decoder = LanguageModel  # its name in the first release


def make_model(config: ModelConfig, layout: Layout, *, key: jax.Array) -> LanguageModel:
    """Make the model for `config.objective`."""
    kind = Bert if config.is_bert else LanguageModel
    return kind(config, layout, key=key)


def model_graph(config: ModelConfig, layout: Layout) -> nnx.GraphDef[LanguageModel]:
    """The model without its parameters, for `nnx.merge`."""
    return nnx.graphdef(jax.eval_shape(lambda: make_model(config, layout, key=jax.random.key(0))))


def _bert_keys(key: jax.Array) -> jax.Array:
    return jax.random.split(jax.random.fold_in(key, 4), 3)


def _part(x: jax.Array, index: int, num_parts: int) -> jax.Array:
    rows = x.shape[0] // num_parts
    return x if num_parts == 1 else x[index * rows : (index + 1) * rows]
