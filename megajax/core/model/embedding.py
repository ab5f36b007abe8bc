"""Vocabulary-parallel embedding, learned positions, and BERT's token types."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from megajax.core.counts.declaration import NUM_SEGMENTS
from megajax.core.model import grid
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout


class VocabParallelEmbedding(nnx.Module):
    """A table whose rows are sharded over `model` and, with 2-D tensor parallelism, over `row`.

    Each shard looks up the tokens that it has, and XLA reduces the partial results.
    """

    def __init__(self, parameters: Parameters, *, key: jax.Array, scale: float = 1.0):
        self.layout, self.scale = parameters.layout, scale
        self.table = parameters.make('table', key)

    def __call__(
        self,
        token_BS: jax.Array,
        dtype: DTypeLike,
        vector_BSD: jax.Array | None = None,
        rows: str = 'B',
    ) -> jax.Array:
        """Look up tokens, multiply by the scale and add `vector_BSD`; return x_BTD in `dtype`.

        The scale and the sum are in fp32, and the result is rounded once. The first dim of
        `vector_BSD` is `rows`: `B`, or `-` for a single row.
        """
        # all-reduce forward, nothing backward (SP: reduce-scatter forward, all-gather backward)
        how = _How(self.layout, rows, dtype, self.scale)
        return _embed(self.table[...], vector_BSD, token_BS, how)


class PositionEmbedding(nnx.Module):
    """A learned, replicated vector per position."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.layout = parameters.layout
        self.table = parameters.make('table', key)

    def __call__(self, token_BS: jax.Array, position_BS: jax.Array | None) -> jax.Array:
        """Return the vectors [B, S, D] of given positions, or [1, S, D] of positions 0, 1, ..."""
        if position_BS is None:
            return jnp.expand_dims(self.table[: token_BS.shape[1]], 0)
        return self.table.at[position_BS].get(out_sharding=self.layout('BSD'))


class TokenTypeEmbedding(nnx.Module):
    """A learned, replicated vector for each of BERT's two segments."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.table = parameters.make('table', key)

    def __call__(self, token_BS: jax.Array, type_BS: jax.Array | None) -> jax.Array:
        """Return the vectors [B, S, D] of the tokens' types (0 or 1; 0 if no types are given)."""
        type_BS = jnp.zeros_like(token_BS) if type_BS is None else type_BS
        first, second = (jnp.expand_dims(self.table[i], (0, 1)) for i in range(NUM_SEGMENTS))
        # A `where` instead of a lookup: its gradient is two sums, while the gradient of a lookup
        # adds every token to one of two rows.
        return jnp.where(jnp.expand_dims(type_BS, -1) == 0, first, second)


class _How(NamedTuple):
    """The settings of a lookup; `rows` is the first dim of the added vectors."""

    layout: Layout
    rows: str
    dtype: DTypeLike
    scale: float


# One function for all tables, so that with SP their gradient is gathered only once.
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _embed(
    table_Vd: jax.Array, vector_BSD: jax.Array | None, token_BS: jax.Array, how: _How
) -> jax.Array:
    layout, rows, dtype, scale = how
    if grid.is_grid(layout):
        x_BTD = grid.lookup(table_Vd.astype(dtype), token_BS, layout)
    else:
        x_BTD = jax.reshard(_lookup(table_Vd.astype(dtype), token_BS, layout), layout('BTD'))
    if scale != 1:
        x_BTD = x_BTD.astype(jnp.float32) * scale
    if vector_BSD is None:
        return x_BTD.astype(dtype)
    vector_BTD = jax.reshard(vector_BSD, layout(f'{rows}TD'))
    return (x_BTD.astype(jnp.float32) + vector_BTD).astype(dtype)


def _lookup(table_Vd: jax.Array, token_BS: jax.Array, layout: Layout) -> jax.Array:
    return table_Vd.at[token_BS].get(out_sharding=layout('BSd'))


Saved = tuple[jax.Array, jax.Array | None, jax.Array]


def _forward(
    table_Vd: jax.Array, vector_BSD: jax.Array | None, token_BS: jax.Array, how: _How
) -> tuple[jax.Array, Saved]:
    return _embed(table_Vd, vector_BSD, token_BS, how), (table_Vd, vector_BSD, token_BS)


def _backward(
    how: _How, saved: Saved, dx_BTD: jax.Array
) -> tuple[jax.Array, jax.Array | None, None]:
    (table_Vd, vector_BSD, token_BS), (layout, rows, _, scale) = saved, how
    dx_BSD = jax.reshard(dx_BTD, layout('BSD'))  # SP: all-gather, in the compute dtype
    # In fp32, because the gradient of a frequent token is a sum of thousands of terms.
    dx_BSd = jax.reshard(dx_BSD, layout('BSd'))  # grid: all-gather over row
    if scale != 1:
        dx_BSd = dx_BSd.astype(jnp.float32) * scale
    dx_BSd = dx_BSd.astype(table_Vd.dtype)
    (dtable_Vd,) = jax.linear_transpose(lambda table: _lookup(table, token_BS, layout), table_Vd)(
        dx_BSd
    )
    if vector_BSD is None:
        return dtable_Vd, None, None
    dx_BSD = dx_BSD.astype(table_Vd.dtype)
    dvector = dx_BSD if rows == 'B' else dx_BSD.sum(0, keepdims=True)
    return dtable_Vd, dvector, None


_embed.defvjp(_forward, _backward)
