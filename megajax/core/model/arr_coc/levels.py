"""The regions of an image at their levels of detail: smaller pictures of what matters less.

A picture is made smaller by area means before it is encoded. So an encoder reads no more patches
than the budget has tokens for, it reads them as it reads any picture, and what a level leaves out
cannot be guessed from features of the whole.

The functions are of one image. Its regions are pictures [region, y, x, channel] of as many pixels
as the finest level has.
"""

import jax
import jax.numpy as jnp

from megajax.core.model.arr_coc.budget import SIDES, Places, side_of
from megajax.core.parallel.layout import UNSHARDED


def at_levels(
    numbers_PX: jax.Array,
    level: jax.Array,
    gate: jax.Array,
    places: Places,
    regions: tuple[int, int],
    *,
    patch_size: int,
    merge_size: int,
) -> jax.Array:
    """Return the patches [total merge_size^2, X] at an image's places; 0 where nothing stands.

    `numbers_PX` are the patches at the finest level, with any number of channels. What a region has
    beyond its coarsest picture is multiplied by `gate` [regions], as a mixture of experts does with
    what it chooses: it gives relevance its only gradient, and a region with the fewest tokens has
    none.
    """
    pixels = _pictures(numbers_PX, regions, patch_size, merge_size)
    own, coarse = (
        _resized(pixels, weight) for weight in _weights(level, SIDES[-1] * patch_size * merge_size)
    )
    gate = gate.reshape(-1, 1, 1, 1, out_sharding=UNSHARDED('----'))
    units = _units(coarse + gate * (own - coarse), patch_size, merge_size)
    index = jnp.maximum(places.region, 0), jnp.maximum(places.cell, 0)
    chosen = units.at[index].get(out_sharding=UNSHARDED('--'))
    chosen = jnp.where(jnp.expand_dims(places.region >= 0, 1), chosen, 0)
    return chosen.reshape(-1, numbers_PX.shape[1], out_sharding=UNSHARDED('--'))


def _weights(level: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the shares of a line's pixels in those at a level, for two pictures.

    They are [region, pixel at the level, pixel]. The first is the picture at the level, the second
    the coarsest one as the pixels of the level see it. Pixels after the last one of a level have no
    share.
    """
    finest, coarsest = SIDES[-1], SIDES[0]
    side = jnp.expand_dims(side_of(level) * (size // finest), 1)
    few = size // finest * coarsest
    to_few = _overlaps(jnp.full_like(side, few), few, size)
    within = _overlaps(side, size, few)
    return _overlaps(side, size, size), einsum('rnf,rfm->rnm', within, to_few)


def _overlaps(side: jax.Array, num_cells: int, num_parts: int) -> jax.Array:
    """Return [region, cell, part]: the share of each of equal parts of a line in a cell's mean.

    `side` [region, 1] is the number of cells that the line has; those after them have no share.
    """
    cell, part = jnp.arange(num_cells).reshape(1, -1, 1), jnp.arange(num_parts).reshape(1, 1, -1)
    side = jnp.expand_dims(side, 2)
    # In whole numbers, of which a line has side * num_parts.
    last = jnp.minimum((cell + 1) * num_parts, (part + 1) * side)
    first = jnp.maximum(cell * num_parts, part * side)
    return jnp.maximum(last - first, 0) / num_parts


def _resized(pixels: jax.Array, weight: jax.Array) -> jax.Array:
    """Return pictures whose rows and columns are these means."""
    by_row = einsum('ryn,rnmc->rymc', weight, pixels)
    return einsum('rxm,rymc->ryxc', weight, by_row)


def _pictures(
    numbers_PX: jax.Array, regions: tuple[int, int], patch_size: int, merge_size: int
) -> jax.Array:
    """Return the picture of each region from patches of units."""
    (rows, columns), p, m, n = regions, patch_size, merge_size, SIDES[-1]
    cells = rows, n, columns, n, m, m, -1, p, p
    x = numbers_PX.reshape(cells, out_sharding=UNSHARDED('-' * 9))
    x = x.transpose(0, 2, 1, 4, 7, 3, 5, 8, 6)  # [rows, columns, n, m, p, n, m, p, channels]
    pictures = rows * columns, n * m * p, n * m * p, x.shape[-1]
    return x.reshape(pictures, out_sharding=UNSHARDED('----'))


def _units(pixels: jax.Array, patch_size: int, merge_size: int) -> jax.Array:
    """Return [region, unit, number], the inverse in each region."""
    p, m, n = patch_size, merge_size, SIDES[-1]
    regions, *_, channels = pixels.shape
    cells = regions, n, m, p, n, m, p, channels
    x = pixels.reshape(cells, out_sharding=UNSHARDED('-' * 8))
    x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # [regions, n, n, m, m, channels, p, p]
    units = regions, n * n, m * m * channels * p * p
    return x.reshape(units, out_sharding=UNSHARDED('---'))


def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply in fp32, also on a GPU whose default is a shorter mantissa."""
    return jnp.einsum(equation, x, w, precision='highest')
