"""Vocabulary-parallel embedding. B batch, S sequence, D model, V vocabulary (padded)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from megajax.model.linear import normal
from megajax.parallel.layout import Layout


class VocabParallelEmbedding(nnx.Module):
    """A table [V, D] whose rows are sharded over `model`; each shard looks up the tokens that it has and XLA adds the parts."""

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.table = nnx.Param(normal(key, (vocab_size, hidden_size), std, layout.vocab_VD))

    def __call__(self, token_BS: jax.Array, dtype: DTypeLike) -> jax.Array:
        """x_BSD in `dtype`, in the placement of the residual stream."""
        # all-reduce forward, nothing backward (SP: reduce-scatter forward, all-gather backward)
        return _lookup(self.table[...], token_BS, self.layout, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: jax.Array, token_BS: jax.Array, layout: Layout, dtype: DTypeLike) -> jax.Array:
    x_BSD = table_VD.astype(dtype).at[token_BS].get(out_sharding=layout.full_BSD(token_BS))
    return jax.reshard(x_BSD, layout.residual_BSD(token_BS))


def _lookup_forward(
    table_VD: jax.Array, token_BS: jax.Array, layout: Layout, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _lookup(table_VD, token_BS, layout, dtype), (table_VD, token_BS)


def _lookup_backward(layout: Layout, dtype: DTypeLike, saved: tuple[jax.Array, jax.Array], dx_BSD: jax.Array) -> tuple[jax.Array, None]:
    table_VD, token_BS = saved
    full = layout.full_BSD(token_BS)
    dx_BSD = jax.reshard(dx_BSD, full)  # SP: all-gather, in the compute dtype
    # A frequent token is added up thousands of times: in fp32.
    lookup = jax.linear_transpose(lambda table: table.at[token_BS].get(out_sharding=full), table_VD)
    return lookup(dx_BSD.astype(table_VD.dtype))[0], None


_lookup.defvjp(_lookup_forward, _lookup_backward)


class PositionEmbedding(nnx.Module):
    """A learned, replicated vector per position."""

    def __init__(self, max_seq_len: int, hidden_size: int, *, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.table = nnx.Param(normal(key, (max_seq_len, hidden_size), std, layout.position_SD))

    def __call__(self, x_BSD: jax.Array, position_BS: jax.Array | None) -> jax.Array:
        """x plus the vectors of its positions: 0, 1, ... unless given."""
        if position_BS is None:
            position_SD = jax.reshard(self.table[: x_BSD.shape[1]], self.layout.residual_SD)
            position_BSD = jnp.expand_dims(position_SD, 0)
        else:
            position_BSD = self.table.at[position_BS].get(out_sharding=self.layout.residual_BSD(x_BSD))
        return (x_BSD.astype(jnp.float32) + position_BSD).astype(x_BSD.dtype)
