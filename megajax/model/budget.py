"""The tokens that each region of an image gets, and where they stand: ARR-COC's budget.

An image is cut into regions, and each has the features of a square of finest cells (20 x 20). At a
level a region is given as area means on a coarser square (`SIDES`), so that what matters to the
question has up to 400 tokens and the rest 64, and all together at most a total. All shapes are
static, nothing communicates, and no token is sorted.

The functions are of one image, to be mapped with `jax.vmap(..., spmd_axis_name='data')`. A level is
discrete and has no gradient: relevance learns from the detail that it is multiplied with (`cells`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax

SIDES = (8, 10, 12, 14, 16, 18, 20)
NUM_WATER_LEVELS = 65
HIGHEST_WATER = 4  # the most that relevance is multiplied with
NUM_EXCHANGES = 4
ENOUGH = 0.97  # of the total


class Places(NamedTuple):
    """The cells that stand at the places of an image's tokens, [total]; -1 at an empty place."""

    region: jax.Array  # of the image, in raster order
    cell: jax.Array  # of the region's square, in raster order
    row: jax.Array  # of the finest cell at the center, among those of the image
    column: jax.Array


def check_relevance(relevance: np.ndarray) -> None:
    """Raise ValueError if a relevance [B, regions] is not finite; for values on the host.

    A compiled step cannot refuse a value. There a NaN has the least relevance, so that the levels
    stay in bounds, and comes back in the loss, on which the step is skipped (`train/guard.py`).
    """
    if not np.isfinite(relevance).all():
        row, region = np.argwhere(~np.isfinite(relevance))[0]
        value = relevance[row, region]
        raise ValueError(f'the relevance of region {region} in row {row} is {value}, not finite')


def num_tokens(level: jax.Array, sides: Sequence[int] = SIDES) -> jax.Array:
    """Return the number of tokens at a level."""
    return _side(level, sides) ** 2


def budget(relevance: jax.Array, total: int, sides: Sequence[int] = SIDES) -> jax.Array:
    """Return the level of each region, as an index of `sides`, from its relevance in [0, 1].

    Between the fewest and the most tokens a region has the share `clip(water * relevance, 0, 1)`,
    rounded down to a level. Then regions rise by a level in the order of relevance while they fit,
    again and again. What is left is used by raising one region and lowering a less relevant one,
    which costs less than either. The water is the highest with which `ENOUGH` of `total` is used,
    or that uses most. A region never has fewer tokens than a less relevant one, and ties go to the
    first.

    `total` is at least the fewest tokens of all regions.
    """
    assert total >= len(relevance) * sides[0] ** 2, (total, relevance.shape)
    relevance = jnp.clip(jnp.nan_to_num(lax.stop_gradient(relevance)), 0, 1)
    fewest, most = sides[0] ** 2, sides[-1] ** 2
    water = jnp.arange(NUM_WATER_LEVELS) * (HIGHEST_WATER / (NUM_WATER_LEVELS - 1))
    share = jnp.minimum(jnp.expand_dims(water, 1) * jnp.expand_dims(relevance, 0), 1)
    wanted = fewest + (most - fewest) * share
    steps = jnp.array([side**2 for side in sides[1:]]).reshape(1, 1, -1)
    by_water = (jnp.expand_dims(wanted, 2) >= steps).sum(2)

    is_at = _order(relevance)
    by_water = jnp.where(jnp.expand_dims(is_at, 0), jnp.expand_dims(by_water, 1), 0).sum(2)

    def use_up(level: jax.Array) -> jax.Array:
        level = lax.fori_loop(0, 2 * len(sides), lambda _, x: _rise(x, total, sides), level)
        return lax.fori_loop(0, NUM_EXCHANGES, lambda _, x: _exchange(x, total, sides), level)

    by_water = jax.vmap(use_up)(by_water)
    used = num_tokens(by_water, sides).sum(1)  # all that the lowest water uses fits
    used = jnp.where(used <= total, jnp.minimum(used, ENOUGH * total), 0)
    highest = NUM_WATER_LEVELS - 1 - jnp.argmax(used[::-1])
    level = lax.dynamic_index_in_dim(by_water, highest, 0, keepdims=False)
    return jnp.where(is_at, jnp.expand_dims(level, 1), 0).sum(0)


def places(
    level: jax.Array, total: int, regions: tuple[int, int], sides: Sequence[int] = SIDES
) -> Places:
    """Return what stands at each of `total` places: all cells of a region after another's.

    `regions` are the rows and columns of regions in the image.
    """
    count = num_tokens(level, sides)
    end = jnp.cumsum(count)
    place = jnp.arange(total)
    region = (jnp.expand_dims(place, 1) >= jnp.expand_dims(end, 0)).sum(1)
    is_there = jnp.expand_dims(region, 1) == jnp.arange(len(level)).reshape(1, -1)

    def of_region(x: jax.Array) -> jax.Array:
        return jnp.where(is_there, jnp.expand_dims(x, 0), 0).sum(1)

    cell = place - of_region(end - count)
    side, finest = jnp.maximum(of_region(_side(level, sides)), 1), sides[-1]
    corner = region // regions[1] * finest, region % regions[1] * finest
    row, column = ((2 * x + 1) * finest // (2 * side) for x in (cell // side, cell % side))
    values = region, cell, corner[0] + row, corner[1] + column
    return Places(*(jnp.where(is_there.any(1), x, -1) for x in values))


def by_region(vectors: jax.Array, regions: tuple[int, int], side: int = SIDES[-1]) -> jax.Array:
    """Return [regions, cells, D] of the vectors of an image's finest cells in raster order."""
    shape = regions[0], side, regions[1], side, vectors.shape[-1]
    vectors = vectors.reshape(shape, out_sharding=P(*(None,) * 5)).swapaxes(1, 2)
    return vectors.reshape(-1, side**2, shape[-1], out_sharding=P(None, None, None))


def cells(
    features: jax.Array, level: jax.Array, gate: jax.Array, sides: Sequence[int] = SIDES
) -> jax.Array:
    """Return the area means of each region at its level, like `features` [regions, cells, D].

    The first `num_tokens` cells of a region are in use, the others 0. What a region has beyond its
    coarsest square is multiplied by `gate` [regions], as a mixture of experts does with what it
    chooses: it gives relevance its only gradient, and a region with the fewest tokens has none.
    """
    side = jnp.expand_dims(_side(level, sides), 1)
    own = _overlaps(side, sides[-1], sides[-1])
    coarsest = _overlaps(jnp.full_like(side, sides[0]), sides[0], sides[-1])
    # The means of the coarsest cells, seen from the cells of the level.
    within = _overlaps(side, sides[-1], sides[0])
    coarse = (jnp.expand_dims(within, 3) * jnp.expand_dims(coarsest, 1)).sum(2)
    own, coarse = _squares(own, side), _squares(coarse, side)
    weight = coarse + gate.reshape(-1, 1, 1, out_sharding=P(None, None, None)) * (own - coarse)
    return jnp.einsum('rcf,rfd->rcd', weight.astype(features.dtype), features)


def fill(cells: jax.Array, places: Places) -> jax.Array:
    """Return the vectors [total, D] at an image's places; 0 where nothing stands."""
    index = jnp.maximum(places.region, 0), jnp.maximum(places.cell, 0)
    vectors = cells.at[index].get(out_sharding=P(None, None))
    return jnp.where(jnp.expand_dims(places.region >= 0, 1), vectors, 0)


def _side(level: jax.Array, sides: Sequence[int]) -> jax.Array:
    """Return `sides[level]` by arithmetic: a lookup by a mapped index needs a placement."""
    steps = zip(sides[1:], sides, strict=False)
    rises = (jnp.where(level > i, side - last, 0) for i, (side, last) in enumerate(steps))
    return sum(rises, 0 * level + sides[0])


def _order(relevance: jax.Array) -> jax.Array:
    """Return is_at[rank, region], whether a region has this rank; the most relevant has rank 0."""
    index = jnp.arange(len(relevance))
    mine, other = jnp.expand_dims(relevance, 0), jnp.expand_dims(relevance, 1)
    is_before = (other > mine) | ((other == mine) & (index.reshape(-1, 1) < index.reshape(1, -1)))
    return jnp.expand_dims(is_before.sum(0), 0) == index.reshape(-1, 1)


def _rise(level: jax.Array, total: int, sides: Sequence[int]) -> jax.Array:
    """Raise regions, given by rank, by one level each for as long as they fit.

    What does not fit by itself is passed over.
    """
    used = num_tokens(level, sides)
    left = total - used.sum()
    cost = num_tokens(level + 1, sides) - used  # 0 at the highest level
    cost = jnp.where(cost <= left, cost, 0)
    return level + ((cost > 0) & (jnp.cumsum(cost) <= left))


def _exchange(level: jax.Array, total: int, sides: Sequence[int]) -> jax.Array:
    """Raise a region by a level and lower a less relevant one, so that most of the rest is used.

    The levels are in descending order, and stay so: the raised one is the first with its level and
    the lowered one the last.
    """
    used, rank = num_tokens(level, sides), jnp.arange(len(level))
    before, after = jnp.diff(level, prepend=len(sides)), jnp.diff(level, append=-1)
    cost = jnp.where(before < 0, num_tokens(level + 1, sides) - used, 0)
    saved = jnp.where(after < 0, used - num_tokens(level - 1, sides), 0)
    gain = jnp.expand_dims(cost, 1) - jnp.expand_dims(saved, 0)
    is_pair = (jnp.expand_dims(cost, 1) > 0) & (jnp.expand_dims(saved, 0) > 0)
    is_pair &= (rank.reshape(-1, 1) < rank.reshape(1, -1)) & (gain <= total - used.sum())
    gain = jnp.where(is_pair, gain, 0)
    raised = (rank == jnp.argmax(gain.max(1))) & (gain.max() > 0)
    of_raised = jnp.where(jnp.expand_dims(raised, 1), gain, 0).max(0)
    lowered = (rank == jnp.argmax(of_raised)) & (gain.max() > 0)
    return level + raised - lowered


def _overlaps(side: jax.Array, num_cells: int, num_parts: int) -> jax.Array:
    """Return [regions, cell, part]: the share of each of equal parts of a line in a cell's mean.

    `side` [regions, 1] is the number of cells that the line has; those after them have no share.
    """
    cell, part = jnp.arange(num_cells).reshape(1, -1, 1), jnp.arange(num_parts).reshape(1, 1, -1)
    side = jnp.expand_dims(side, 2)
    # In whole numbers, of which a line has side * num_parts.
    last = jnp.minimum((cell + 1) * num_parts, (part + 1) * side)
    first = jnp.maximum(cell * num_parts, part * side)
    return jnp.maximum(last - first, 0) / num_parts


def _squares(line: jax.Array, side: jax.Array) -> jax.Array:
    """Return the weights of squares [regions, cells, finest cells] from those of lines."""
    finest = line.shape[2]
    cell = jnp.arange(finest**2).reshape(1, -1)
    row, column = (jax.nn.one_hot(x, finest, dtype=line.dtype) for x in (cell // side, cell % side))
    by_row, by_column = (
        (jnp.expand_dims(x, 3) * jnp.expand_dims(line, 1)).sum(2) for x in (row, column)
    )
    weight = jnp.expand_dims(by_row, 3) * jnp.expand_dims(by_column, 2)
    return weight.reshape(len(line), finest**2, finest**2, out_sharding=P(None, None, None))
