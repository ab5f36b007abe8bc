"""Vocabulary-parallel embedding. B batch, S sequence, D model, V vocabulary (padded)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from megajax.config.parameters import NUM_TOKEN_TYPES
from megajax.model.linear import normal
from megajax.parallel.layout import Layout


class VocabParallelEmbedding(nnx.Module):
    """A table [V, D] whose rows are sharded over `model`; each shard looks up the tokens that it has and XLA adds the parts."""

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.table = nnx.Param(normal(key, (vocab_size, hidden_size), std, layout.vocab_VD))

    def __call__(self, token_BS: jax.Array, dtype: DTypeLike, position_BSD: jax.Array | None = None) -> jax.Array:
        """x_BSD in `dtype`, in the placement of the residual stream; `position_BSD`, whole on every device, is added to it."""
        # all-reduce forward, nothing backward (SP: reduce-scatter forward, all-gather backward)
        return _embed(self.table[...], position_BSD, token_BS, self.layout, dtype)


class PositionEmbedding(nnx.Module):
    """A learned, replicated vector per position."""

    def __init__(self, max_seq_len: int, hidden_size: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.table = nnx.Param(normal(key, (max_seq_len, hidden_size), std, layout.position_SD))

    def __call__(self, token_BS: jax.Array, position_BS: jax.Array | None) -> jax.Array:
        """The vectors of the tokens' positions [B or 1, S, D]: of 0, 1, ... unless given."""
        if position_BS is None:
            return jnp.expand_dims(self.table[: token_BS.shape[1]], 0)
        return self.table.at[position_BS].get(out_sharding=self.layout.full_BSD(token_BS))


class TokenTypeEmbedding(nnx.Module):
    """A learned, replicated vector for each of BERT's two segments."""

    def __init__(self, hidden_size: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.table = nnx.Param(normal(key, (NUM_TOKEN_TYPES, hidden_size), std, layout.position_SD))

    def __call__(self, token_BS: jax.Array, type_BS: jax.Array | None) -> jax.Array:
        """The vectors of the tokens' types [B, S, D], 0 or 1; of 0 unless given."""
        type_BS = jnp.zeros_like(token_BS) if type_BS is None else type_BS
        first, second = (jnp.expand_dims(self.table[i], (0, 1)) for i in range(NUM_TOKEN_TYPES))
        # A choice and not a lookup: its gradient is two sums, where that of a lookup adds every token to one of two rows.
        return jnp.where(jnp.expand_dims(type_BS, -1) == 0, first, second)


# One function of all tables, so that with SP the gradient is gathered once for them.
@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _embed(table_VD: jax.Array, position_BSD: jax.Array | None, token_BS: jax.Array, layout: Layout, dtype: DTypeLike) -> jax.Array:
    x_BSD = jax.reshard(_lookup(table_VD.astype(dtype), token_BS, layout), layout.residual_BSD(token_BS))
    if position_BSD is None:
        return x_BSD
    return (x_BSD.astype(jnp.float32) + jax.reshard(position_BSD, layout.residual_BSD(position_BSD))).astype(dtype)


def _lookup(table_VD: jax.Array, token_BS: jax.Array, layout: Layout) -> jax.Array:
    return table_VD.at[token_BS].get(out_sharding=layout.full_BSD(token_BS))


Saved = tuple[jax.Array, jax.Array | None, jax.Array]


def _forward(
    table_VD: jax.Array, position_BSD: jax.Array | None, token_BS: jax.Array, layout: Layout, dtype: DTypeLike
) -> tuple[jax.Array, Saved]:
    return _embed(table_VD, position_BSD, token_BS, layout, dtype), (table_VD, position_BSD, token_BS)


def _backward(layout: Layout, dtype: DTypeLike, saved: Saved, dx_BSD: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    table_VD, position_BSD, token_BS = saved
    dx_BSD = jax.reshard(dx_BSD, layout.full_BSD(token_BS))  # SP: all-gather, in the compute dtype
    # A frequent token is added up thousands of times: in fp32.
    dx_BSD = dx_BSD.astype(table_VD.dtype)
    (dtable_VD,) = jax.linear_transpose(lambda table: _lookup(table, token_BS, layout), table_VD)(dx_BSD)
    if position_BSD is None:
        return dtable_VD, None, None
    return dtable_VD, dx_BSD if position_BSD.shape == dx_BSD.shape else dx_BSD.sum(0, keepdims=True), None


_embed.defvjp(_forward, _backward)
