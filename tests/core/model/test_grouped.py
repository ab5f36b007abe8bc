"""Matmuls of rows sorted by expert: against every row by its own expert's matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import exhaustive

from megajax.core.counts.expert_rows import block_rows
from megajax.core.model.grouped import (
    Groups,
    group,
    outer,
    rows_by_transposed,
    rows_by_weights,
)

EXPERTS, D, F, BLOCK = 5, 12, 20, 8
grouped = jax.jit(group, static_argnames=('num_experts', 'block'))

# Most are of one length: each length compiles every operation anew.
DISTRIBUTIONS = {
    'random': [3, 0, 4, 4, 1, 2, 0, 3, 3, 3, 4, 1, 0, 2, 2, 3, 3, 3, 3, 1, 3, 3, 3],
    'some of other devices': [5, 3, 5, 0, 0, 5, 5, 4, 3, 3, 5, 1, 2, 5, 2, 2, 5, 0, 4, 5, 1, 3, 5],
    'experts without rows': [1, 1, 1, 3, 1, 3, 1, 1, 1, 1, 1, 1, 3, 1, 1, 1, 3, 1, 1, 1, 1, 3, 1],
    'all of one expert': [2] * 23,
    'whole blocks': [0] * 8 + [4] * 16,
    'all of other devices': [5] * 23,
    'one': [4],
}


def rows_of(x_nD: np.ndarray, groups: Groups) -> jax.Array:
    return jnp.asarray(x_nD).at[groups.source_R].get(mode='fill', fill_value=0)


@pytest.fixture(params=DISTRIBUTIONS)
def expert_n(request: pytest.FixtureRequest) -> np.ndarray:
    return np.array(DISTRIBUTIONS[request.param], np.int32)


def test_rows_are_in_the_order_of_experts_and_of_assignments(expert_n: np.ndarray) -> None:
    groups = grouped(expert_n, EXPERTS, block=BLOCK)
    assert groups.source_R.size == -(-expert_n.size // BLOCK) * BLOCK + EXPERTS * BLOCK
    assert groups.block == BLOCK
    source_R, place_n = np.asarray(groups.source_R), np.asarray(groups.place_n)
    is_used = source_R < expert_n.size
    mine = expert_n < EXPERTS
    np.testing.assert_array_equal(
        source_R[is_used], np.argsort(expert_n, stable=True)[: mine.sum()]
    )
    np.testing.assert_array_equal(place_n[source_R[is_used]], np.flatnonzero(is_used))
    assert np.all(place_n[~mine] == source_R.size)


def test_each_block_has_rows_of_one_expert_and_unused_blocks_are_last(expert_n: np.ndarray) -> None:
    groups = grouped(expert_n, EXPERTS, block=BLOCK)
    counts = np.bincount(expert_n, minlength=EXPERTS + 1)[:EXPERTS]
    np.testing.assert_array_equal(groups.sizes_X, -(-counts // BLOCK) * BLOCK)
    expert_b = np.asarray(groups.expert_b)
    used = np.repeat(np.arange(EXPERTS), np.asarray(groups.sizes_X) // BLOCK)
    np.testing.assert_array_equal(expert_b[: used.size], used)
    assert np.all(expert_b[used.size :] == EXPERTS)
    blocks = np.asarray(groups.source_R).reshape(-1, BLOCK)
    for expert, source_r in zip(expert_b, blocks, strict=True):
        assert np.all(expert_n[source_r[source_r < expert_n.size]] == expert)


def test_products_are_those_of_every_row_with_its_expert(expert_n: np.ndarray) -> None:
    random = np.random.default_rng(0)
    x_nD, dy_nF, w_XDF = (
        random.standard_normal(shape)
        for shape in ((expert_n.size, D), (expert_n.size, F), (EXPERTS, D, F))
    )
    w_XDF = np.concatenate([w_XDF, np.zeros((1, D, F))])  # of other devices
    y_nF = np.einsum('nd,ndf->nf', x_nD, w_XDF[expert_n])
    dx_nD = np.einsum('nf,ndf->nd', dy_nF, w_XDF[expert_n])
    dw_XDF = np.einsum('nx,nd,nf->xdf', np.eye(EXPERTS + 1)[expert_n][:, :EXPERTS], x_nD, dy_nF)

    @jax.jit
    def products(expert_n, x_nD, dy_nF, w_XDF):
        groups = group(expert_n, EXPERTS, block=BLOCK)
        x_RD, dy_RF = rows_of(x_nD, groups), rows_of(dy_nF, groups)
        y_RF, dx_RD = rows_by_weights(x_RD, w_XDF, groups), rows_by_transposed(dy_RF, w_XDF, groups)
        place_n = groups.place_n
        back = (y.at[place_n].get(mode='fill', fill_value=0) for y in (y_RF, dx_RD))
        return *back, outer(x_RD, dy_RF, groups)

    arrays = (x.astype(np.float32) for x in (x_nD, dy_nF, w_XDF[:EXPERTS]))
    for y, expected in zip(products(expert_n, *arrays), (y_nF, dx_nD, dw_XDF), strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=3e-6)


def test_the_padding_gives_zeros_whatever_it_contains(expert_n: np.ndarray) -> None:
    groups = grouped(expert_n, EXPERTS, block=BLOCK)
    x_RD, w_XDF = jnp.full((groups.source_R.size, D), jnp.nan), jnp.ones((EXPERTS, D, F))
    y_RF = np.asarray(jax.jit(rows_by_weights)(x_RD, w_XDF, groups))
    is_padding = np.asarray(groups.source_R) == expert_n.size
    assert np.all(y_RF[is_padding] == 0)
    assert np.all(np.isnan(y_RF[~is_padding]))


@pytest.mark.parametrize('dtype', ['bfloat16', exhaustive('float16')])
def test_rows_keep_their_dtype_and_sums_over_rows_are_in_fp32(dtype: str) -> None:
    random = np.random.default_rng(0)
    groups = grouped(np.zeros(512, np.int32), 2, block=BLOCK)
    x_RD, dy_RF, w_XDF = (
        jnp.asarray(random.standard_normal(shape), dtype)
        for shape in ((groups.source_R.size, D), (groups.source_R.size, F), (2, D, F))
    )
    x_RD = jnp.where((groups.source_R < 512)[:, None], x_RD, 0)
    y_RF = jax.jit(rows_by_weights)(x_RD, w_XDF, groups)
    exact = np.asarray(x_RD, np.float64)
    assert y_RF.dtype == dtype
    expected = jnp.asarray(exact @ np.asarray(w_XDF[0], np.float64), dtype)
    np.testing.assert_allclose(
        np.asarray(y_RF, np.float32), np.asarray(expected, np.float32), rtol=1e-2, atol=1e-6
    )
    dw_XDF = jax.jit(outer)(x_RD, dy_RF, groups)
    assert dw_XDF.dtype == jnp.float32
    np.testing.assert_allclose(dw_XDF[0], exact.T @ np.asarray(dy_RF, np.float64), atol=1e-4)


@pytest.mark.parametrize(
    ('assignments', 'experts', 'rows'),
    [(64, 8, 8), (2048, 8, 64), (65536, 128, 128), (1 << 20, 8, 128), (1, 128, 8)],
)
def test_blocks_are_at_most_a_quarter_of_an_experts_share(
    assignments: int, experts: int, rows: int
) -> None:
    assert block_rows(assignments, experts) == rows
