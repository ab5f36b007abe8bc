"""Matmuls of sorted rows with the weights of their experts, on one device.

On Hopper GPUs they run in kernels (`grouped_kernels.py`), elsewhere in a loop over blocks of rows.

Letters: n is assignments of a token to an expert, X experts, R rows in the order of experts, b
blocks of rows, D and F the features of a row before and after the matmul. The rows of each expert
begin at a multiple of the block size, so each block belongs to one expert and is multiplied by one
matrix.

The functions are for arrays of one device, inside a `shard_map` over all axes of the mesh, and are
not differentiated: the gradients of `rows_by_weights` are `rows_by_transposed` and `outer`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.counts.expert_rows import num_blocks
from megajax.core.model.grouped_kernels import (
    fewest_rows,
    has_kernels,
    outer_of_experts,
    rows_by_expert,
)


class Groups(NamedTuple):
    """How sorted rows are divided among experts, each of which has a whole number of blocks."""

    place_n: jax.Array  # row of each assignment, or R if its expert is on a different device
    source_R: jax.Array  # assignment of each row, or n in the padding
    sizes_X: jax.Array  # number of rows of each expert with its padding
    expert_b: jax.Array  # expert of each block, or X in the unused blocks, which come last

    @property
    def block(self) -> int:
        """Return the number of rows of a block."""
        return self.source_R.size // self.expert_b.size

    @property
    def rows_b(self) -> jax.Array:
        """The number of rows of each block without its padding, which follows them."""
        is_row_br = self.source_R.reshape(-1, self.block) < self.place_n.size
        return is_row_br.sum(1, dtype=jnp.int32)


def group(expert_n: jax.Array, num_experts: int, *, block: int) -> Groups:
    """Return the rows of assignments sorted by expert.

    Experts with the number `num_experts` are on a different device, and get no rows. Assignments of
    one expert keep their order. There are enough rows for the worst distribution. `block` is raised
    to the fewest rows that the GPU's kernels support.
    """
    block = max(block, fewest_rows(expert_n))
    assignments = expert_n.size
    blocks = num_blocks(assignments, num_experts, block)
    is_mine_nX = expert_n[:, None] == jnp.arange(num_experts)[None]
    count_X = jnp.sum(is_mine_nX, axis=0, dtype=jnp.int32)
    block_X = -(-count_X // block)
    end_X = jnp.cumsum(block_X)
    order_n = jnp.argsort(expert_n, stable=True)
    # How far a sorted assignment moves to its row: by the total padding of the experts before its
    # own.
    shift_X = (end_X - block_X) * block - (jnp.cumsum(count_X) - count_X)
    row_n = jnp.arange(assignments) + shift_X.at[expert_n[order_n]].get(mode='fill', fill_value=0)
    row_n = jnp.where(expert_n[order_n] < num_experts, row_n, blocks * block)
    place_n = jnp.zeros_like(row_n).at[order_n].set(row_n, unique_indices=True)
    return Groups(
        place_n=place_n,
        source_R=jnp.full(blocks * block, assignments).at[row_n].set(order_n, mode='drop'),
        sizes_X=block_X * block,
        expert_b=jnp.searchsorted(end_X, jnp.arange(blocks), side='right', method='compare_all'),
    )


def rows_by_weights(x_RD: jax.Array, w_XDF: jax.Array, groups: Groups) -> jax.Array:
    """Return each row times the matrix of its expert, in the dtype of x; padding rows are zeros."""
    if has_kernels(x_RD, w_XDF, _features(w_XDF), groups.block):
        return rows_by_expert(x_RD, w_XDF, *_of_blocks(groups), transposed=False)
    return _by_blocks('rd,df->rf', x_RD, w_XDF, w_XDF.shape[2], groups)


def rows_by_transposed(dy_RF: jax.Array, w_XDF: jax.Array, groups: Groups) -> jax.Array:
    """Return each row times its expert's matrix transposed, as `rows_by_weights` does."""
    if has_kernels(dy_RF, w_XDF, _features(w_XDF), groups.block):
        return rows_by_expert(dy_RF, w_XDF, *_of_blocks(groups), transposed=True)
    return _by_blocks('rf,df->rd', dy_RF, w_XDF, w_XDF.shape[1], groups)


def outer(x_RD: jax.Array, dy_RF: jax.Array, groups: Groups) -> jax.Array:
    """Return the sum of outer products of each expert's rows, dw_XDF in fp32.

    In the padding, one of x and dy must be zeros, and the other one finite.
    """
    shape_XDF = (groups.sizes_X.size, x_RD.shape[1], dy_RF.shape[1])
    if has_kernels(x_RD, dy_RF, shape_XDF[1:], groups.block):
        end_X = jnp.cumsum(groups.sizes_X)
        return outer_of_experts(x_RD, dy_RF, end_X - groups.sizes_X, groups.sizes_X)

    def add(
        dw_XDF: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        expert, x_rD, dy_rF = block
        return _if_used(
            groups,
            expert,
            lambda: dw_XDF.at[expert].add(_product('rd,rf->df', x_rD, dy_rF)),
            lambda: dw_XDF,
        ), None

    blocks = groups.expert_b, _blocks(x_RD, groups), _blocks(dy_RF, groups)
    return lax.scan(add, jnp.zeros(shape_XDF, jnp.float32), blocks)[0]


def _of_blocks(groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Return an expert and the number of rows for each block; unused blocks have 0 rows."""
    return jnp.minimum(groups.expert_b, groups.sizes_X.size - 1), groups.rows_b


def _features(w_XDF: jax.Array) -> tuple[int, int]:
    _, inputs, outputs = w_XDF.shape
    return inputs, outputs


def _by_blocks(
    equation: str, x_RD: jax.Array, w_XDF: jax.Array, features: int, groups: Groups
) -> jax.Array:
    assignments = groups.place_n.size

    def multiply(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        expert, source_r, x_rD = block

        def product() -> jax.Array:
            y_rF = _product(equation, x_rD, w_XDF[expert]).astype(x_RD.dtype)
            return jnp.where((source_r < assignments)[:, None], y_rF, jnp.zeros_like(y_rF))

        zeros_rF = jnp.zeros((groups.block, features), x_RD.dtype)
        return _if_used(groups, expert, product, lambda: zeros_rF)

    source_br = groups.source_R.reshape(-1, groups.block)
    y_brF = lax.map(multiply, (groups.expert_b, source_br, _blocks(x_RD, groups)))
    return y_brF.reshape(-1, features)


def _if_used(
    groups: Groups,
    expert: jax.Array,
    used: Callable[[], jax.Array],
    unused: Callable[[], jax.Array],
) -> jax.Array:
    return lax.cond(expert < groups.sizes_X.size, used, unused)


def _blocks(x_RD: jax.Array, groups: Groups) -> jax.Array:
    return x_RD.reshape(groups.expert_b.size, groups.block, -1)


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
