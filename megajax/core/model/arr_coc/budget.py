"""Distribute the tokens of an image over its regions: ARR-COC's budget.

An image is cut into regions. Each region has a level, at which it is resized to a square of cells
(`SIDES`), one token per cell: regions that matter to the question get up to 400 tokens, the rest
64, and all regions together at most a given total number. All shapes are static, nothing
communicates, and no token is sorted.

The functions handle one image; map them with `jax.vmap`. A level is discrete and has no gradient:
relevance learns through the gate that multiplies the detail (`levels.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

SIDES = (8, 10, 12, 14, 16, 18, 20)
NUM_WATER_LEVELS = 65
HIGHEST_WATER = 4  # the largest factor of relevance
NUM_EXCHANGES = 4
ENOUGH = 0.97  # share of the total at which no higher water is tried


class Places(NamedTuple):
    """The cell of each of an image's token positions, [total]; -1 at an empty position."""

    region: jax.Array  # index of the region, in raster order
    cell: jax.Array  # row and column in the region's square, as an index into the finest square
    row: jax.Array  # row of the finest cell at the cell's center, counted over the whole image
    column: jax.Array


def num_tokens(level: jax.Array, sides: Sequence[int] = SIDES) -> jax.Array:
    """Return the number of tokens at a level."""
    return side_of(level, sides) ** 2


def budget(relevance: jax.Array, total: int, sides: Sequence[int] = SIDES) -> jax.Array:
    """Return the level of each region, as an index of `sides`, from its relevance in [0, 1].

    Each region gets the share `clip(water * relevance, 0, 1)` of the range between the fewest and
    the most tokens, rounded down to a level. Then regions are raised by a level in the order of
    relevance while they fit, repeatedly. Remaining tokens are used by raising one region and
    lowering a less relevant one, which costs fewer tokens than a raise alone. The factor `water` is
    the highest one that uses at least `ENOUGH` of `total`; if there is none, it is the one that
    uses the most tokens. A region never has fewer tokens than a less relevant one; ties go to the
    first region.

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
    used = num_tokens(by_water, sides).sum(1)  # tokens that the lowest water uses; these always fit
    used = jnp.where(used <= total, jnp.minimum(used, ENOUGH * total), 0)
    highest = NUM_WATER_LEVELS - 1 - jnp.argmax(used[::-1])
    level = lax.dynamic_index_in_dim(by_water, highest, 0, keepdims=False)
    return jnp.where(is_at, jnp.expand_dims(level, 1), 0).sum(0)


def places(
    level: jax.Array, total: int, regions: tuple[int, int], sides: Sequence[int] = SIDES
) -> Places:
    """Return the cell at each of `total` token positions, region by region.

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
    side, finest = jnp.maximum(of_region(side_of(level, sides)), 1), sides[-1]
    corner = region // regions[1] * finest, region % regions[1] * finest
    own = cell // side, cell % side
    row, column = ((2 * x + 1) * finest // (2 * side) for x in own)
    values = region, own[0] * finest + own[1], corner[0] + row, corner[1] + column
    return Places(*(jnp.where(is_there.any(1), x, -1) for x in values))


def side_of(level: jax.Array, sides: Sequence[int] = SIDES) -> jax.Array:
    """Return `sides[level]` by arithmetic: indexing with a mapped array needs a sharding."""
    steps = zip(sides[1:], sides, strict=False)
    rises = (jnp.where(level > i, side - last, 0) for i, (side, last) in enumerate(steps))
    return sum(rises, 0 * level + sides[0])


def _order(relevance: jax.Array) -> jax.Array:
    """Return is_at[rank, region]: whether a region has this rank, 0 for the most relevant."""
    index = jnp.arange(len(relevance))
    mine, other = jnp.expand_dims(relevance, 0), jnp.expand_dims(relevance, 1)
    is_before = (other > mine) | ((other == mine) & (index.reshape(-1, 1) < index.reshape(1, -1)))
    return jnp.expand_dims(is_before.sum(0), 0) == index.reshape(-1, 1)


def _rise(level: jax.Array, total: int, sides: Sequence[int]) -> jax.Array:
    """Raise regions, given by rank, by one level each as long as there are tokens left.

    A region whose next level does not fit is skipped.
    """
    used = num_tokens(level, sides)
    left = total - used.sum()
    cost = num_tokens(level + 1, sides) - used  # 0 at the highest level
    cost = jnp.where(cost <= left, cost, 0)
    return level + ((cost > 0) & (jnp.cumsum(cost) <= left))


def _exchange(level: jax.Array, total: int, sides: Sequence[int]) -> jax.Array:
    """Raise one region and lower a less relevant one by a level, so that the fewest tokens remain.

    The levels stay in descending order, because the raised region is the first with its level, and
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
