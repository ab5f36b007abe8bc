"""Sums over a vocabulary that a 2-D grid shards over both axes, scattered onto both.

The residual stream is sharded over tokens and over D. XLA makes a reduce-scatter of a sum whose
result each device takes a part of, but only if that part is of one dim; of two dims, it reduces
everything to everywhere, which sends twice the bytes, and cuts.
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

    Each token looks up one piece of its vector for each row of the grid, as if they were tokens of
    their own: so the part of a device is of one dim, that of the pieces.
    """
    vocab, size = table_Vd.shape
    (batch, length), rows = token_BS.shape, layout.num_shards('D')
    pieces = table_Vd.reshape(vocab, rows, size // rows, out_sharding=layout('V--'))
    pieces = pieces.reshape(vocab * rows, size // rows, out_sharding=layout('V-'))
    row = jnp.expand_dims(jnp.arange(rows), (0, 2))
    index = (jnp.expand_dims(token_BS, 1) * rows + row).reshape(batch, rows * length)
    x = pieces.at[index].get(out_sharding=layout('BS-'))
    x = jax.reshard(x, layout('BV-'))  # a device has the place that it has in the vocabulary
    x = x.reshape(batch, rows, length, size // rows, out_sharding=layout('BDT-'))
    return jnp.moveaxis(x, 1, 2).reshape(batch, length, size, out_sharding=layout('BTD'))


def input_gradient(
    dy: jax.Array, head_dV: jax.Array, rows: str, layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """Multiply dy [*rows, V] by the head: a reduce-scatter over `model`, and one over `row`.

    The dims of the result are `rows` and D, with T in the place of S. The vocabulary of each row of
    the grid is summed by itself, and then the sums of all rows.
    """
    size, vocab = head_dV.shape
    count = layout.num_shards('D')
    scattered = rows.replace('S', 'T')
    parts = *dy.shape[:-1], count, vocab // count
    # In these two, D and F stand for the parts of V over `row` and over `model`.
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
