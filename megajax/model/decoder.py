"""The decoder: embedding, a stack of blocks, norm, head. B batch, S sequence, D model, V vocabulary (padded), L layers."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import Config
from megajax.model.block import Block
from megajax.model.dropout import dropout, fold_in
from megajax.model.embedding import PositionEmbedding, VocabParallelEmbedding
from megajax.model.linear import normal
from megajax.model.loss import Loss
from megajax.model.norm import make_norm
from megajax.parallel.layout import Layout


class Decoder(nnx.Module):
    """GPT-2, Llama, Qwen3 and Megatron's GPT, by the fields of `config.model`.

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
        key_B: jax.Array | None = None,
        num_parts: int = 1,
    ) -> jax.Array:
        """x_BSD after the last norm, in the residual placement; `key_B` (see `dropout.sequence_keys`) turns dropout on.

        The rows go through each layer in `num_parts` parts that do not depend on one another.
        """
        with jax.named_scope('embedding'):
            vectors_BSD = None if self.position is None else self.position(token_BS, position_BS)
            x_BSD = self.embedding(token_BS, jnp.dtype(self.config.train.dtype), vectors_BSD)
            x_BSD = dropout(x_BSD, self.config.model.dropout, fold_in(key_B, self.config.model.num_layers))

        parts = [jax.tree.map(lambda x, i=i: _part(x, i, num_parts), (position_BS, segment_BS, key_B)) for i in range(num_parts)]

        def layer(xs_BSD: tuple[jax.Array, ...], layer: tuple[Block, jax.Array]) -> tuple[tuple[jax.Array, ...], None]:
            block, index = layer
            made = (block(x, position, segment, fold_in(key, index)) for x, (position, segment, key) in zip(xs_BSD, parts, strict=True))
            return tuple(made), None

        if self.config.train.recompute == 'full':
            layer = jax.checkpoint(layer, prevent_cse=False)
        with jax.named_scope('layers'):
            xs_BSD = tuple(_part(x_BSD, i, num_parts) for i in range(num_parts))
            xs_BSD, _ = lax.scan(layer, xs_BSD, (self.layers, jnp.arange(self.config.model.num_layers)))
            x_BSD = xs_BSD[0] if num_parts == 1 else jnp.concatenate(xs_BSD)
        with jax.named_scope('norm'):
            return self.norm(x_BSD)

    def __call__(self, token_BS: jax.Array, *, position_BS: jax.Array | None = None, segment_BS: jax.Array | None = None) -> jax.Array:
        """Logits [B, S, V] in fp32, sharded over the vocabulary; those of padding are the lowest number."""
        x_BSD = self.hidden(token_BS, position_BS=position_BS, segment_BS=segment_BS)
        with jax.named_scope('head'):
            x_BSD = jax.reshard(x_BSD, self.layout.full_BSD(x_BSD))  # f: nothing (SP: all-gather)
            return Loss.of(self.config).logits(x_BSD, self.head_VD.T)


def _part(x: jax.Array, index: int, num_parts: int) -> jax.Array:
    rows = x.shape[0] // num_parts
    return x if num_parts == 1 else x[index * rows : (index + 1) * rows]


def model_graph(config: Config) -> nnx.GraphDef[Decoder]:
    """The model without its parameters: `nnx.merge(model_graph(config), params)` is a Decoder."""
    return nnx.graphdef(jax.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))
