"""The texture of an image: 13 channels in fp32, without parameters or communication.

The channels follow ARR-COC (Adaptive Relevance Realization - Contexts Optical Compression), with
kornia's formulas. Every minimum and maximum is taken over one image, so that no image depends on
the others in its batch; coarser grids use area means.

Images come as patches, ordered so that the patches of a merge unit are adjacent. Gradients read one
pixel beyond the borders of a patch, so each patch is padded with the edges of its neighbors.
Without this padding, an array of whole images would have to fit images of every shape.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megajax.core.parallel.layout import UNSHARDED

CHANNELS = (
    *('red', 'green', 'blue', 'lightness', 'green to red', 'gradient x', 'gradient y', 'gradient'),
    *('y', 'x', 'eccentricity', 'saliency', 'luminance'),
)
SALIENCY = CHANNELS.index('gradient')
# The Z of CIE XYZ is needed for b* alone, which is not a channel.
_RGB_TO_XY = (0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169)
_WHITE = 0.95047, 1.0
_RGB_TO_GRAY = 0.299, 0.587, 0.114
_EPSILON = 1e-8


def texture(pixels: jax.Array, grid: jax.Array, *, patch_size: int, merge_size: int) -> jax.Array:
    """Return the channels [P, 13 p p] of an image of patches; 0 where a patch is unused.

    `pixels` is uint8 [P, 3 p p], each patch ordered as (channel, y, x), and so is the result;
    `grid` has the rows and columns of patches of the image, both multiples of `merge_size`.
    """
    size, count = patch_size, len(pixels)
    measured = _measure(pixels, grid, size, merge_size)
    row, column = (place * size for place in patch_places(grid, count, merge_size))
    pixel = jnp.arange(size)
    y = jnp.expand_dims(row, (1, 2)) + pixel.reshape(1, size, 1)
    x = jnp.expand_dims(column, (1, 2)) + pixel.reshape(1, 1, size)
    height, width = grid[0] * size, grid[1] * size
    is_used = jnp.broadcast_to(jnp.expand_dims(row, (1, 2)) < height, measured[0].shape)
    channels = _complete(measured, y / _last(height), x / _last(width), is_used, axis=1)
    return channels.reshape(count, -1, out_sharding=UNSHARDED('--'))


def region_texture(
    pixels: jax.Array,
    grid: jax.Array,
    regions: tuple[int, int],
    *,
    patch_size: int,
    merge_size: int,
) -> jax.Array:
    """Return the channels [regions, 13] of an image that is cut into rows and columns of regions.

    The image fills its patches, and its regions are as high as they are wide, in units. If the
    image is empty, every channel is 0. Area means are taken before the extremes of the image, so
    that the regions' gradients range from 0 to 1. In the position channels, the first region is at
    0, the last at 1, and a single one at 1/2.
    """
    rows, columns = regions
    side = math.isqrt(len(pixels) // (rows * columns * merge_size**2))
    shape = rows, side, columns, side * merge_size**2

    def means(channel: jax.Array) -> jax.Array:
        of_patches = _mean(channel, (1, 2))
        return _mean(of_patches.reshape(shape, out_sharding=UNSHARDED('----')), (1, 3))

    measured = [means(channel) for channel in _measure(pixels, grid, patch_size, merge_size)]
    y, x = (jnp.linspace(0, 1, n) if n > 1 else jnp.full(1, 0.5) for n in regions)
    # has the channels' sharding; all inputs of a stack must have the same one
    zero = 0 * measured[0]
    is_used = zero + grid[0] > 0
    y, x = zero + jnp.expand_dims(y, 1), zero + jnp.expand_dims(x, 0)
    channels = _complete(measured, y, x, is_used, axis=-1)
    return channels.reshape(-1, len(CHANNELS), out_sharding=UNSHARDED('--'))


def _mean(x: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Return the mean over two axes of numbers in [-1, 1], to about 1e-6.

    Sums of integers are exact. Sums of floats would depend on the number of images, and where the
    regions of an image hardly differ, the scorers would multiply their rounding by up to 1e4.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    unit = 2.0 ** (count - 1).bit_length() / 2**30  # no sum exceeds 32 bits
    return jnp.rint(x / unit).astype(jnp.int32).sum(axes).astype(jnp.float32) * (unit / count)


def patch_places(grid: jax.Array, count: int, merge_size: int) -> tuple[jax.Array, jax.Array]:
    """Return the row and the column of each of `count` patches in the image.

    Patches after the last one of the image are in rows below it.
    """
    patch, unit_size = jnp.arange(count), merge_size**2
    unit, inside = patch // unit_size, patch % unit_size
    units_per_row = jnp.maximum(grid[1] // merge_size, 1)
    row = unit // units_per_row * merge_size + inside // merge_size
    column = unit % units_per_row * merge_size + inside % merge_size
    return row, column


def _measure(
    pixels: jax.Array, grid: jax.Array, patch_size: int, merge_size: int
) -> list[jax.Array]:
    """Measure the first eight channels, each [P, y, x], without scaling them."""
    shape = len(pixels), 3, patch_size, patch_size
    rgb = pixels.reshape(shape, out_sharding=UNSHARDED('----')).astype(jnp.float32) / 255
    colors = [rgb[:, i] for i in range(3)]
    gray = _weighted(_RGB_TO_GRAY, colors)
    gradients = _sobel(_with_edges(gray, grid, merge_size))
    return [*colors, *_lightness(colors), *gradients]


def _weighted(weights: Sequence[float], colors: Sequence[jax.Array]) -> jax.Array:
    """Add three colors elementwise: the rounding of a matmul would depend on its size."""
    red, green, blue = (w * color for w, color in zip(weights, colors, strict=True))
    return red + green + blue


def _lightness(colors: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return L* / 100 and (a* + 128) / 255 of CIE L*a*b*, whose b* is not used."""
    linear = [
        jnp.where(color > 0.04045, ((color + 0.055) / 1.055) ** 2.4, color / 12.92)
        for color in colors
    ]

    def f(row: int) -> jax.Array:
        ratio = _weighted(_RGB_TO_XY[row], linear) / _WHITE[row]
        root = jnp.cbrt(jnp.maximum(ratio, 0.008856))
        return jnp.where(ratio > 0.008856, root, 7.787 * ratio + 4 / 29)

    fx, fy = f(0), f(1)
    return (116 * fy - 16) / 100, (500 * (fx - fy) + 128) / 255


def _sobel(gray: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients by x and by y and the length of both, from [P, y + 2, x + 2] pixels."""
    size = gray.shape[1] - 2

    def at(y: int, x: int) -> jax.Array:
        return gray[:, y : y + size, x : x + size]

    by_x = (at(0, 2) - at(0, 0) + 2 * (at(1, 2) - at(1, 0)) + at(2, 2) - at(2, 0)) / 8
    by_y = (at(2, 0) - at(0, 0) + 2 * (at(2, 1) - at(0, 1)) + at(2, 2) - at(0, 2)) / 8
    return by_x, by_y, jnp.sqrt(by_x * by_x + by_y * by_y + _EPSILON)


def _with_edges(patches: jax.Array, grid: jax.Array, merge_size: int) -> jax.Array:
    """Pad each patch [P, y, x] on all sides with one pixel of its neighbors.

    At the image's border the patch's own pixels are repeated. Corners need no extra step: columns
    are added when the neighbors already have their rows.
    """
    row, column = patch_places(grid, len(patches), merge_size)

    def neighbors(edge: jax.Array, own: jax.Array, down: int, right: int) -> jax.Array:
        """Return the edges of the neighbors in a direction, or `own` if there is no neighbor."""
        place = row + down, column + right
        last = jnp.maximum(grid - 1, 0)
        other = [jnp.clip(x, 0, last[dim]) for dim, x in enumerate(place)]
        unit = other[0] // merge_size * (grid[1] // merge_size) + other[1] // merge_size
        inside = other[0] % merge_size * merge_size + other[1] % merge_size
        index = jnp.minimum(unit * merge_size**2 + inside, len(patches) - 1)
        is_other = (other[0] != row) | (other[1] != column)
        edge = edge.at[index].get(out_sharding=UNSHARDED('--'))
        return jnp.where(jnp.expand_dims(is_other, 1), edge, own)

    first, last = patches[:, 0], patches[:, -1]
    above, below = neighbors(last, first, -1, 0), neighbors(first, last, 1, 0)
    rows = [jnp.expand_dims(above, 1), patches, jnp.expand_dims(below, 1)]
    patches = jnp.concatenate(rows, 1)
    first, last = patches[:, :, 0], patches[:, :, -1]
    before, after = neighbors(last, first, 0, -1), neighbors(first, last, 0, 1)
    return jnp.concatenate([jnp.expand_dims(before, 2), patches, jnp.expand_dims(after, 2)], 2)


def _complete(
    measured: Sequence[jax.Array], y: jax.Array, x: jax.Array, is_used: jax.Array, axis: int
) -> jax.Array:
    """Scale gradients to [0, 1], append the other channels and stack all channels along `axis`."""
    y, x = (jnp.broadcast_to(place, measured[0].shape) for place in (y, x))
    *colors, by_x, by_y, length = measured
    by_x, by_y, length = (_from_zero_to_one(gradient, is_used) for gradient in (by_x, by_y, length))
    eccentricity = jnp.sqrt((y - 0.5) ** 2 + (x - 0.5) ** 2) / 0.5**0.5
    lightness = colors[3]
    channels = [*colors, by_x, by_y, length, y, x, eccentricity, length, lightness]
    return jnp.stack([jnp.where(is_used, channel, 0) for channel in channels], axis)


def _from_zero_to_one(x: jax.Array, is_used: jax.Array) -> jax.Array:
    low = jnp.where(is_used, x, jnp.inf).min()
    high = jnp.where(is_used, x, -jnp.inf).max()
    return (x - low) / (high - low + _EPSILON)


def _last(length: jax.Array) -> jax.Array:
    """Return the index of the last pixel, at least 1 so that it divides."""
    return jnp.maximum(length - 1, 1)
