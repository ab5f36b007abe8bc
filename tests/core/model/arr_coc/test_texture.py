"""The 13 channels of an image are kornia's, whatever stands beside it in a batch."""

import functools

import jax
import numpy as np
import pytest
from jax import P
from jax.stages import Wrapped

from megajax.core.model.arr_coc.texture import CHANNELS, region_texture, texture
from megajax.core.parallel.mesh import make_mesh

PATCH, MERGE, SLOT = 4, 2, 24  # a slot has more patches than the images
SIZES = {'patch_size': PATCH, 'merge_size': MERGE}
GRIDS = (4, 4), (2, 8), (6, 4), (2, 2)


def to_patches(image: np.ndarray) -> np.ndarray:
    """The patches [P, 3 p p] of an image [3, H, W], in the order of merge units."""
    rows, columns = (size // PATCH // MERGE for size in image.shape[1:])
    units = image.reshape(len(image), rows, MERGE, PATCH, columns, MERGE, PATCH)
    return units.transpose(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns * MERGE**2, -1)


def to_image(patches: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """The inverse of `to_patches`."""
    rows, columns = (size // MERGE for size in grid)
    used = patches[: grid[0] * grid[1]]
    units = used.reshape(rows, columns, MERGE, MERGE, -1, PATCH, PATCH)
    return units.transpose(4, 0, 2, 5, 1, 3, 6).reshape(-1, grid[0] * PATCH, grid[1] * PATCH)


def images() -> tuple[np.ndarray, np.ndarray]:
    """Random images in their slots: uint8 [4, P, 3 p p] with their grids [4, 2]."""
    random = np.random.default_rng(0)
    pixels = np.zeros((len(GRIDS), SLOT, 3 * PATCH**2), np.uint8)
    for slot, (rows, columns) in zip(pixels, GRIDS, strict=True):
        image = random.integers(256, size=(3, rows * PATCH, columns * PATCH))
        image = image // 3 if rows == columns else image  # with other extremes than its neighbors
        slot[: rows * columns] = to_patches(image)
    return pixels, np.array(GRIDS, np.int32)


def lightness_and_red(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    matrix = [[0.412453, 0.357580, 0.180423], [0.212671, 0.715160, 0.072169]]
    x, y = np.tensordot(matrix, linear, 1) / np.reshape([0.95047, 1.0], (2, 1, 1))
    x, y = (np.where(v > 0.008856, np.cbrt(v), 7.787 * v + 4 / 29) for v in (x, y))
    return (116 * y - 16) / 100, (500 * (x - y) + 128) / 255


def gradients(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    gray = np.pad(np.tensordot([0.299, 0.587, 0.114], rgb, 1), 1, mode='edge')
    windows = np.lib.stride_tricks.sliding_window_view(gray, (3, 3))
    kernel = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    by_x, by_y = (np.einsum('yxij,ij->yx', windows, k) for k in (kernel, kernel.T))
    return by_x, by_y, np.sqrt(by_x**2 + by_y**2 + 1e-8)


def reference(image: np.ndarray, cells: tuple[int, int]) -> np.ndarray:
    """The 13 channels [13, rows, columns] of the area means of a uint8 image, in float64."""
    rgb = image / 255

    def mean(x: np.ndarray) -> np.ndarray:
        rows, columns = cells
        fine = np.kron(x, np.ones(cells))  # every cell has the same number of these
        return fine.reshape(rows, x.shape[0], columns, x.shape[1]).mean((1, 3))

    def unit(x: np.ndarray) -> np.ndarray:
        return (x - x.min()) / (x.max() - x.min() + 1e-8)

    light, red = map(mean, lightness_and_red(rgb))
    by_x, by_y, length = (unit(mean(x)) for x in gradients(rgb))
    sides = (np.linspace(0, 1, n) if n > 1 else np.array([0.5]) for n in cells)
    y, x = np.meshgrid(*sides, indexing='ij')
    eccentricity = np.hypot(y - 0.5, x - 0.5) / np.sqrt(0.5)
    colors = map(mean, rgb)
    return np.stack([*colors, light, red, by_x, by_y, length, y, x, eccentricity, length, light])


def on(data: int, model: int, function, *arrays: np.ndarray) -> np.ndarray:
    """The function of each row of the arrays, with the rows over `data`."""
    with jax.set_mesh(make_mesh(data, model)):

        def put(x: np.ndarray) -> jax.Array:
            return jax.device_put(x, P('data', *(None,) * (x.ndim - 1)))

        return np.asarray(mapped(function)(*map(put, arrays)))


@functools.cache
def mapped(function) -> Wrapped:
    return jax.jit(jax.vmap(function, spmd_axis_name='data'))


def pixel_channels(pixels, grid):
    return texture(pixels, grid, **SIZES)


def region_channels(pixels, grid):
    return region_texture(pixels, grid, (3, 2), **SIZES)


def test_the_channels_of_every_pixel_are_kornias():
    pixels, grids = images()
    actual = on(1, 1, pixel_channels, pixels, grids)
    for channels, slot, grid in zip(actual, pixels, GRIDS, strict=True):
        image = to_image(slot, grid)
        expected = reference(image, image.shape[1:])
        error = np.abs(to_image(channels, grid) - expected).max((1, 2))
        assert dict(zip(CHANNELS, error, strict=True)) == pytest.approx(
            dict.fromkeys(CHANNELS, 0), abs=2e-5
        )
        assert not channels[grid[0] * grid[1] :].any()


def of_regions(regions: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images that regions of `side` units fill, and an empty one."""
    grid = regions[0] * side * MERGE, regions[1] * side * MERGE
    shape = 3, grid[0] * PATCH, grid[1] * PATCH
    drawn = np.random.default_rng(0).integers(256, size=(3, *shape))
    pixels = np.stack(
        [to_patches(image // scale) for image, scale in zip(drawn, (1, 3, 2), strict=True)]
    )
    grids = np.array([grid, grid, (0, 0)], np.int32)
    return pixels.astype(np.uint8), grids


@pytest.mark.parametrize(('regions', 'side'), [((4, 1), 2), ((2, 2), 1), ((3, 5), 3)])
def test_the_channels_of_a_region_are_of_area_means(regions, side):
    pixels, grids = of_regions(regions, side)
    actual = on(1, 1, lambda *image: region_texture(*image, regions, **SIZES), pixels, grids)
    for channels, slot in zip(actual[:2], pixels, strict=False):
        expected = reference(to_image(slot, tuple(grids[0])), regions).reshape(len(CHANNELS), -1).T
        np.testing.assert_allclose(channels, expected, atol=2e-5)
    assert not actual[2].any()


def channels_and_regions(pixels, grid):
    regions = region_texture(pixels, grid, (3, 2), **SIZES)
    return jax.numpy.concatenate([texture(pixels, grid, **SIZES).sum(0), regions.sum(1)])


def test_an_image_does_not_depend_on_its_neighbors_or_the_mesh():
    pixels, grids = images()
    together = on(1, 1, channels_and_regions, pixels, grids)
    others = pixels.copy()
    others[1:] = 255 - others[:0:-1]
    changed = on(1, 1, channels_and_regions, others, grids)
    np.testing.assert_array_equal(changed[0], together[0])
    assert np.abs(changed[1] - together[1]).max() > 0.1
    np.testing.assert_allclose(on(4, 2, channels_and_regions, pixels, grids), together, rtol=1e-6)


def test_the_regions_of_an_image_have_the_same_bits_in_every_batch():
    """The scorers multiply a difference of regions that hardly differ by up to 1e4."""
    regions, side = (1, 2), 10
    grid = side * MERGE, 2 * side * MERGE
    random = np.random.default_rng(0)
    drawn = random.integers(256, size=(8, 3, grid[0] * PATCH, grid[1] * PATCH))
    pixels = np.stack([to_patches(image) for image in drawn]).astype(np.uint8)
    grids = np.full((8, 2), grid, np.int32)

    def channels(pixels, grid):
        return region_texture(pixels, grid, regions, **SIZES)

    together = on(1, 1, channels, pixels, grids)
    alone = [
        on(1, 1, channels, *each) for each in zip(pixels[:, None], grids[:, None], strict=True)
    ]
    np.testing.assert_array_equal(together, np.concatenate(alone))
    np.testing.assert_array_equal(together, on(8, 1, channels, pixels, grids))


@pytest.mark.parametrize('value', [0, 255])
def test_a_flat_image_and_an_empty_slot_are_finite(value):
    pixels, grids = images()
    pixels[0], grids[1:] = value, 0
    for function in (pixel_channels, region_channels):
        channels = on(1, 1, function, pixels, grids)
        assert np.isfinite(channels).all()
        assert not channels[1:].any()
