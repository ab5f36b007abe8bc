"""The model: embedding, a stack of blocks, norm, head. B batch, S sequence, D model, V vocabulary (padded), L layers."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import Config
from megajax.model.bert_heads import MaskedHead, OrderHead
from megajax.model.block import Block
from megajax.model.dropout import dropout, fold_in
from megajax.model.embedding import PositionEmbedding, TokenTypeEmbedding, VocabParallelEmbedding
from megajax.model.linear import normal
from megajax.model.loss import Loss
from megajax.model.main_gradient import pair
from megajax.model.norm import make_norm
from megajax.parallel.layout import Layout


class Decoder(nnx.Module):
    """GPT-2, Llama, Qwen3 and Megatron's GPT and BERT, by the fields of `config.model`; BERT's blocks look both ways.

    Parameters are fp32, created in their places on the current mesh (`jax.set_mesh`), the same numbers on every mesh.
    """

    def __init__(self, config: Config, *, key: jax.Array):
        model, layout = config.model, Layout.of(config)
        self.config, self.layout = config, layout
        embedding_key, position_key, layers_key, head_key = jax.random.split(key, 4)
        vocab, hidden, std = model.padded_vocab_size, model.hidden_size, model.init_std
        learned, tied = model.position == 'learned', model.tie_embeddings
        self.embedding = VocabParallelEmbedding(vocab, hidden, std=std, layout=layout, key=embedding_key)
        self.position = PositionEmbedding(model.max_seq_len, hidden, std=std, layout=layout, key=position_key) if learned else None
        block = partial(Block, model, layout, recompute_attention=config.train.recompute == 'selective')
        self.layers = jax.vmap(lambda key: block(key=key))(jax.random.split(layers_key, model.num_layers))
        self.norm = make_norm(model, hidden)
        self.head = None if tied else nnx.Param(normal(head_key, (vocab, hidden), std, layout.vocab_VD))
        type_key, masked_key, order_key = jax.random.split(jax.random.fold_in(key, 4), 3)
        self.token_type = None if model.causal else TokenTypeEmbedding(hidden, std=std, layout=layout, key=type_key)
        self.masked_head = None if model.causal else MaskedHead(model, layout, key=masked_key)
        self.order_head = None if model.causal else OrderHead(model, layout, key=order_key)

    @property
    def head_VD(self) -> jax.Array:
        """The weight that makes logits: the embedding table where it is tied."""
        return self.embedding.table[...] if self.head is None else self.head[...]

    def hidden(
        self,
        token_BS: jax.Array,
        *,
        position_BS: jax.Array | None = None,
        segment_BS: jax.Array | None = None,
        type_BS: jax.Array | None = None,
        key_B: jax.Array | None = None,
        num_parts: int = 1,
        weights: Block | None = None,
    ) -> jax.Array:
        """x_BSD after the last norm, in the residual placement; `key_B` (see `dropout.sequence_keys`) turns dropout on.

        The rows go through each layer in `num_parts` parts that do not depend on one another. `weights` are those of the layers in the
        compute dtype, where `self.layers` has zeros that take their gradients (`main_gradient.py`).
        """
        with jax.named_scope('embedding'):
            vectors_BSD = None if self.position is None else self.position(token_BS, position_BS)
            if self.token_type is not None:
                types_BSD = self.token_type(token_BS, type_BS)
                vectors_BSD = types_BSD if vectors_BSD is None else vectors_BSD + types_BSD
            x_BSD = self.embedding(token_BS, jnp.dtype(self.config.train.dtype), vectors_BSD)
            x_BSD = dropout(x_BSD, self.config.model.dropout, fold_in(key_B, self.config.model.num_layers))

        parts = [jax.tree.map(lambda x, i=i: _part(x, i, num_parts), (position_BS, segment_BS, key_B)) for i in range(num_parts)]

        def layer(xs_BSD: tuple[jax.Array, ...], layer: tuple[Block, Block | None, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
            block, weights, index = layer
            block = block if weights is None else pair(weights, block)
            made = (block(x, position, segment, fold_in(key, index)) for x, (position, segment, key) in zip(xs_BSD, parts, strict=True))
            return tuple(made), None

        if self.config.train.recompute == 'full':
            layer = jax.checkpoint(layer, prevent_cse=False)
        with jax.named_scope('layers'):
            xs_BSD = tuple(_part(x_BSD, i, num_parts) for i in range(num_parts))
            xs_BSD, _ = lax.scan(layer, xs_BSD, (self.layers, weights, jnp.arange(self.config.model.num_layers)))
            x_BSD = xs_BSD[0] if num_parts == 1 else jnp.concatenate(xs_BSD)
        with jax.named_scope('norm'):
            return self.norm(x_BSD)

    def before_head(self, x_BSD: jax.Array) -> jax.Array:
        """What the head makes logits of, from `hidden`, in the residual placement: the same, or what BERT's masked-LM head makes of it."""
        with jax.named_scope('head'):
            return x_BSD if self.masked_head is None else self.masked_head(x_BSD)

    @property
    def head_bias_V(self) -> jax.Array | None:
        """What is added to the logits; only BERT has it."""
        return None if self.masked_head is None else self.masked_head.bias[...]

    def __call__(
        self,
        token_BS: jax.Array,
        *,
        position_BS: jax.Array | None = None,
        segment_BS: jax.Array | None = None,
        type_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Logits [B, S, V] in fp32, sharded over the vocabulary; those of padding are the lowest number."""
        x_BSD = self.before_head(self.hidden(token_BS, position_BS=position_BS, segment_BS=segment_BS, type_BS=type_BS))
        with jax.named_scope('head'):
            x_BSD = jax.reshard(x_BSD, self.layout.full_BSD(x_BSD))  # f: nothing (SP: all-gather)
            return Loss.of(self.config).logits(x_BSD, self.head_VD.T, self.head_bias_V)


def _part(x: jax.Array, index: int, num_parts: int) -> jax.Array:
    rows = x.shape[0] // num_parts
    return x if num_parts == 1 else x[index * rows : (index + 1) * rows]


def model_graph(config: Config) -> nnx.GraphDef[Decoder]:
    """The model without its parameters: `nnx.merge(model_graph(config), params)` is a Decoder."""
    return nnx.graphdef(jax.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))
