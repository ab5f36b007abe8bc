"""Regions have 64 to 400 tokens, the relevant ones more, and all together no more than a total."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P
from support import slow

from megajax.core.model.arr_coc.budget import SIDES, budget, num_tokens, places
from megajax.core.parallel.mesh import make_mesh

TOKENS = np.square(SIDES)
COLLECTIVES = 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute'
relevances = st.one_of(
    st.floats(0, 1, width=32, allow_subnormal=False),  # XLA takes these as 0
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),  # the latter make ties
)


@functools.cache
def compiled(regions: int, total: int):
    return jax.jit(functools.partial(budget, total=total))


@functools.cache
def attainable(regions: int) -> np.ndarray:
    """All sums of the tokens of so many regions."""
    sums = {0}
    for _ in range(regions):
        sums = {a + int(b) for a, b in itertools.product(sums, TOKENS)}
    return np.array(sorted(sums))


@st.composite
def cases(draw, regions):
    fewest, most = regions * 64, regions * 400
    # A few totals, because each is compiled by itself.
    total = draw(st.sampled_from([fewest, fewest + 30, most * 2 // 5, most // 2, most - 50, most]))
    values = draw(st.lists(relevances, min_size=regions, max_size=regions))
    return np.array(values, np.float32), total


@pytest.mark.parametrize('regions', [slow(2), 4, slow(16)])
@given(data=st.data())
@settings(deadline=None, max_examples=50)
def test_budgets_are_in_bounds_used_up_and_in_the_order_of_relevance(regions, data):
    relevance, total = data.draw(cases(regions))
    tokens = TOKENS[np.asarray(compiled(len(relevance), total)(relevance))]
    assert tokens.min() >= 64
    assert tokens.max() <= 400
    sums = attainable(len(relevance))
    best = sums[sums <= total].max()  # of 4 regions, 286 tokens leave 30 that no level can use
    assert 0.97 * min(total, best) <= tokens.sum() <= total
    order = np.lexsort((np.arange(len(relevance)), -relevance))
    assert (np.diff(tokens[order]) <= 0).all()


@pytest.mark.parametrize('value', [0.0, 0.7, 1.0])
def test_regions_of_equal_relevance_differ_by_one_or_two_levels(value):
    for regions, total in [(4, 640), (16, 2048), (16, 4096)]:
        level = np.asarray(compiled(regions, total)(np.full(regions, value, np.float32)))
        assert np.ptp(level) <= 2
        assert (np.diff(level) <= 0).all()


def test_one_relevant_region_has_all_that_a_region_can_have():
    relevance = np.array([0, 0, 1, 0], np.float32)
    tokens = TOKENS[np.asarray(compiled(4, 640)(relevance))]
    assert tokens.tolist() == [100, 64, 400, 64]


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_relevance_that_is_not_finite_stays_in_bounds(bad):
    relevance = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
    relevance[1, 2] = bad
    tokens = TOKENS[np.asarray(compiled(4, 640)(relevance[1]))]
    assert tokens.min() >= 64
    assert tokens.sum() <= 640


def test_other_sides_have_other_budgets():
    of_sides = jax.jit(functools.partial(budget, total=40, sides=(2, 3, 6)))
    level = np.asarray(of_sides(np.array([1, 0.1], np.float32)))
    assert level.tolist() == [2, 0]


def of_image(level, total, regions):
    with jax.set_mesh(make_mesh(1, 1)):
        found = jax.jit(functools.partial(places, total=total, regions=regions))(jnp.array(level))
        return jax.tree.map(np.asarray, found)


def test_every_cell_of_every_region_has_one_place():
    level, total = [6, 0, 3, 1, 0, 2], 1000
    found = of_image(level, total, (2, 3))
    expected = [
        (region, row * 20 + column)
        for region, of_region in enumerate(level)
        for row in range(SIDES[of_region])
        for column in range(SIDES[of_region])
    ]
    used = len(expected)
    assert used < total
    assert list(zip(found.region[:used], found.cell[:used], strict=True)) == expected
    assert all((x[used:] == -1).all() for x in found)


def test_a_place_is_at_the_center_of_its_cell_on_the_finest_grid():
    level, regions = [6, 0, 3, 1, 0, 2], (2, 3)
    found = of_image(level, 1000, regions)
    for region, cell, row, column in zip(*found, strict=True):
        if region < 0:
            continue
        side = SIDES[level[region]]
        corner = np.array(divmod(region, regions[1])) * 20
        center = corner + (np.array(divmod(cell, 20)) + 0.5) * 20 / side
        assert [row, column] == np.floor(center).tolist()


def row(relevance):
    level = budget(relevance, 1100)
    return num_tokens(level), places(level, 1100, (2, 3))


def test_budgets_are_the_same_on_every_mesh_and_communicate_nothing():
    relevance = np.random.default_rng(0).random((8, 6), 'f4')
    results = []
    for shape in ((1, 1), (2, 4)):
        with jax.set_mesh(make_mesh(*shape)):
            placed = jax.device_put(relevance, P('data', None))
            mapped = jax.jit(jax.vmap(row, spmd_axis_name='data')).lower(placed).compile()
            results.append(jax.tree.map(np.asarray, mapped(placed)))
            text = mapped.as_text()
            assert not any(f' {name}(' in text for name in COLLECTIVES)
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], result)
