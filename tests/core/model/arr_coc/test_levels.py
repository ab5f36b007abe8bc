"""A region at a level is a smaller picture of it, whose detail relevance learns from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from support import exhaustive

from megajax.core.model.arr_coc.budget import SIDES, places
from megajax.core.model.arr_coc.levels import at_levels
from megajax.core.parallel.mesh import make_mesh
from megajax.runtime.data.patches import PatchSize

REGIONS, LEVEL = (2, 3), [6, 0, 3, 1, 0, 2]
GATE = np.random.default_rng(1).uniform(0, 2, 6).astype('f4')
TOTAL = 1100
COLLECTIVES = 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute'
SIZES = [(2, 1), (1, 2), (3, 2)]  # patch and merge


def picture(patch: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """A picture that its regions fill exactly, and its patches."""
    unit = 20 * patch * merge
    height, width = REGIONS[0] * unit, REGIONS[1] * unit
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    grid = height // patch, width // patch
    size = PatchSize(patch_size=patch, merge_size=merge, max_patches=grid[0] * grid[1])
    return pixels, size.cut(pixels, grid)


def patches_at_levels(patches, gate, patch: int, merge: int, level=LEVEL):
    level = jnp.array(level)
    placed = places(level, TOTAL, REGIONS)
    sizes = {'patch_size': patch, 'merge_size': merge}
    return at_levels(patches.astype(jnp.float32), level, gate, placed, REGIONS, **sizes)


def area_means(pixels: np.ndarray, side: int) -> np.ndarray:
    """A square picture of `side` pixels, from one of their product."""
    fine = pixels.astype('f4').repeat(side, 0).repeat(side, 1)
    return fine.reshape(side, len(pixels), side, len(pixels), 3).mean((1, 3))


@pytest.mark.parametrize(('patch', 'merge'), [*SIZES[:2], exhaustive(*SIZES[2])])
def test_the_patches_of_a_region_are_those_of_its_smaller_picture(patch, merge):
    pixels, patches = picture(patch, merge)
    with jax.set_mesh(make_mesh(1, 1)):
        made = jax.jit(patches_at_levels, static_argnums=(2, 3))(patches, np.ones(6), patch, merge)
    unit, start = patch * merge, 0
    for region, level in enumerate(LEVEL):
        side, (row, column) = SIDES[level], np.array(divmod(region, 3)) * 20 * unit
        square = pixels[row : row + 20 * unit, column : column + 20 * unit]
        small = area_means(square, side * unit)
        size = PatchSize(patch_size=patch, merge_size=merge, max_patches=(side * merge) ** 2)
        expected = size.cut(np.zeros_like(small, np.uint8), (side * merge, side * merge))
        cells = small.reshape(side, merge, patch, side, merge, patch, 3)
        expected = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(expected.shape)
        np.testing.assert_allclose(made[start : start + len(expected)], expected, atol=2e-3)
        start += len(expected)
    assert not np.asarray(made[start:]).any()


def test_a_gate_is_a_mixture_of_the_coarsest_picture_and_the_level_s():
    patches = jnp.asarray(picture(2, 1)[1])
    with jax.set_mesh(make_mesh(1, 1)):
        run = jax.jit(functools.partial(patches_at_levels, patches, patch=2, merge=1))
        coarse, fine, mixed = (np.asarray(run(gate)) for gate in (0 * GATE, 1 + 0 * GATE, GATE))
    used = np.repeat(GATE, np.square(SIDES)[LEVEL])
    gate = np.pad(used, (0, TOTAL - len(used)))[:, None]
    np.testing.assert_allclose(mixed, coarse + gate * (fine - coarse), atol=1e-3)


def test_relevance_learns_from_the_regions_with_detail_and_from_no_other():
    patches = jnp.asarray(picture(2, 1)[1])

    def loss(gate):
        return jnp.square(patches_at_levels(patches, gate, 2, 1)).mean()

    with jax.set_mesh(make_mesh(1, 1)):
        gradient = jax.jit(jax.grad(loss))(jnp.ones(6))
    np.testing.assert_array_equal(np.asarray(gradient) != 0, np.array(LEVEL) > 0)


@pytest.mark.parametrize('mesh', [(2, 4), exhaustive((8, 1)), exhaustive((1, 8))])
def test_levels_communicate_nothing(mesh):
    _, patches = picture(2, 1)
    rows = np.repeat(patches[None], 8, 0)
    with jax.set_mesh(make_mesh(*mesh)):
        row = functools.partial(patches_at_levels, patch=2, merge=1)
        arrays = [
            jax.device_put(x, P('data', *(None,) * (x.ndim - 1)))
            for x in (rows, np.repeat(GATE[None], 8, 0))
        ]
        compiled = jax.jit(jax.vmap(row, spmd_axis_name='data')).lower(*arrays).compile()
        made = np.asarray(compiled(*arrays))
    np.testing.assert_array_equal(made, made[:1].repeat(8, 0))
    assert not any(f' {name}(' in compiled.as_text() for name in COLLECTIVES)
