"""Sums over a vocabulary that 2-D tensor parallelism shards over both axes, scattered over both.

The residual stream is sharded over tokens and over D. If each device needs a part of a sum, XLA
emits a reduce-scatter, but only if a single dim is split. If two dims are split, XLA emits an
all-reduce, which sends twice the bytes, and slices the result.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from megajax.core.model.platform import accumulation_dtype
from megajax.core.parallel.layout import Layout


def is_grid(layout: Layout) -> bool:
    """Whether the vocabulary and the residual stream are sharded over the same two mesh axes."""
    axes = *layout.mesh_axes('D'), *layout.mesh_axes('T')
    return len(axes) == 2 and layout.mesh_axes('V') == axes


def lookup(table_Vd: jax.Array, token_BS: jax.Array, layout: Layout) -> jax.Array:
    """Look up x_BTD: one reduce-scatter over the grid.

    Each token looks up one piece of its vector for each row of the grid, as if the pieces were
    separate tokens. A device's part of the sum is thus split along a single dim, the pieces.
    """
    vocab, size = table_Vd.shape
    (batch, length), rows = token_BS.shape, layout.num_shards('D')
    pieces = table_Vd.reshape(vocab, rows, size // rows, out_sharding=layout('V--'))
    pieces = pieces.reshape(vocab * rows, size // rows, out_sharding=layout('V-'))
    row = jnp.expand_dims(jnp.arange(rows), (0, 2))
    index = (jnp.expand_dims(token_BS, 1) * rows + row).reshape(batch, rows * length)
    x = pieces.at[index].get(out_sharding=layout('BS-'))
    x = jax.reshard(x, layout('BV-'))  # in the order in which the vocabulary is sharded
    x = x.reshape(batch, rows, length, size // rows, out_sharding=layout('BDT-'))
    return jnp.moveaxis(x, 1, 2).reshape(batch, length, size, out_sharding=layout('BTD'))


def input_gradient(
    dy: jax.Array, head_dV: jax.Array, rows: str, layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """Multiply dy [*rows, V] by the head: a reduce-scatter over `model`, and one over `row`.

    The dims of the result are `rows` and D, with T in place of S. The sum runs over the part of the
    vocabulary within each row of the grid first, and then over the rows.
    """
    size, vocab = head_dV.shape
    count = layout.num_shards('D')
    scattered = rows.replace('S', 'T')
    parts = *dy.shape[:-1], count, vocab // count
    # In these two, D and F are the letters for the parts of V over `row` and over `model`.
    dy = dy.reshape(parts, out_sharding=layout(f'{rows}DF'))
    head = head_dV.reshape(size, count, vocab // count, out_sharding=layout('dDF'))
    partial = lax.dot_general(
        dy,
        head,
        (((dy.ndim - 1,), (2,)), ((dy.ndim - 2,), (1,))),
        preferred_element_type=accumulation_dtype(dy, dtype),
        out_sharding=layout(f'D{scattered}d'),
    ).astype(dtype)
    return lax.reduce_sum(partial, (0,), out_sharding=layout(f'{scattered}D'))
