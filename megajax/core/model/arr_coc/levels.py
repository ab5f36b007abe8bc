"""Resize the regions of an image to their levels of detail: regions that matter less get smaller.

A region is downsampled by area means before it is encoded. The encoder therefore reads only as many
patches as the budget has tokens for, as if they were an ordinary image, and no feature of the full
image can reveal the detail that a level drops.

The functions handle one image. Its regions are images [region, y, x, channel] with as many pixels
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
    """Return the patches [total merge_size^2, X] at an image's token positions; 0 if empty.

    `numbers_PX` are the patches at the finest level, with any number of channels. The difference
    between a region and its coarsest level is multiplied by `gate` [regions], as a mixture of
    experts multiplies the outputs of the chosen experts. This is relevance's only gradient, and a
    region with the fewest tokens contributes nothing to it.
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
    """Return two matrices that resize a line of pixels to a level: directly, and via the coarsest.

    They are [region, pixel at the level, pixel]. The first gives the image at the level, the second
    the coarsest image, resampled to the pixels of the level. Rows after a level's last pixel are 0.
    """
    finest, coarsest = SIDES[-1], SIDES[0]
    side = jnp.expand_dims(side_of(level) * (size // finest), 1)
    few = size // finest * coarsest
    to_few = _overlaps(jnp.full_like(side, few), few, size)
    within = _overlaps(side, size, few)
    return _overlaps(side, size, size), einsum('rnf,rfm->rnm', within, to_few)


def _overlaps(side: jax.Array, num_cells: int, num_parts: int) -> jax.Array:
    """Return [region, cell, part]: the weight of each equal part of a line in a cell's mean.

    `side` [region, 1] is the number of cells in the line; further cells have weight 0.
    """
    cell, part = jnp.arange(num_cells).reshape(1, -1, 1), jnp.arange(num_parts).reshape(1, 1, -1)
    side = jnp.expand_dims(side, 2)
    # The unit is 1 / (side * num_parts) of the line, so that all bounds are integers.
    last = jnp.minimum((cell + 1) * num_parts, (part + 1) * side)
    first = jnp.maximum(cell * num_parts, part * side)
    return jnp.maximum(last - first, 0) / num_parts


def _resized(pixels: jax.Array, weight: jax.Array) -> jax.Array:
    """Return images whose rows and columns are the means with these weights."""
    by_row = einsum('ryn,rnmc->rymc', weight, pixels)
    return einsum('rxm,rymc->ryxc', weight, by_row)


def _pictures(
    numbers_PX: jax.Array, regions: tuple[int, int], patch_size: int, merge_size: int
) -> jax.Array:
    """Return the image of each region from patches that are ordered by merge unit."""
    (rows, columns), p, m, n = regions, patch_size, merge_size, SIDES[-1]
    cells = rows, n, columns, n, m, m, -1, p, p
    x = numbers_PX.reshape(cells, out_sharding=UNSHARDED('-' * 9))
    x = x.transpose(0, 2, 1, 4, 7, 3, 5, 8, 6)  # [rows, columns, n, m, p, n, m, p, channels]
    pictures = rows * columns, n * m * p, n * m * p, x.shape[-1]
    return x.reshape(pictures, out_sharding=UNSHARDED('----'))


def _units(pixels: jax.Array, patch_size: int, merge_size: int) -> jax.Array:
    """Return [region, unit, number]: the patches of each region, the inverse of `_pictures`."""
    p, m, n = patch_size, merge_size, SIDES[-1]
    regions, *_, channels = pixels.shape
    cells = regions, n, m, p, n, m, p, channels
    x = pixels.reshape(cells, out_sharding=UNSHARDED('-' * 8))
    x = x.transpose(0, 1, 4, 2, 5, 7, 3, 6)  # [regions, n, n, m, m, channels, p, p]
    units = regions, n * n, m * m * channels * p * p
    return x.reshape(units, out_sharding=UNSHARDED('---'))


def einsum(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply in full fp32, also on a GPU whose default precision is lower."""
    return jnp.einsum(equation, x, w, precision='highest')
