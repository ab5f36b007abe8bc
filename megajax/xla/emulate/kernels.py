"""Grouped matmul kernels in Mosaic GPU as jax functions."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from megajax.xla.emulate.shapes import Shape
from megajax.xla.hlo import mosaic
from megajax.xla.hlo.errors import HloError

STEP = 64  # number of rows that megajax's `outer` kernel reads at once
Function = Callable[..., jax.Array]


def meaning_of_kernel(
    kernel: mosaic.Grouped, results: Sequence[Shape]
) -> Callable[..., tuple[jax.Array]]:
    """Return a jax function that computes a grouped matmul from its operands.

    When called, the function raises HloError if it is unknown whether square matrices are
    transposed.
    """
    [result] = results
    functions: dict[tuple[str, bool], Function] = {
        ('rows', False): partial(_rows, bool(kernel.transposed)),
        ('outer', False): _outer,
        ('rows', True): partial(_rows_of_jax, result.dims[-1]),
        ('outer', True): _outer_of_jax,
    }
    function = functions[kernel.kind, kernel.of_jax]

    def as_result(*operands: jax.Array) -> tuple[jax.Array]:
        *vectors, x, y = operands
        in_fp32 = function(*vectors, x.astype(jnp.float32), y.astype(jnp.float32))
        return (in_fp32.astype(result.abstract().dtype),)

    return as_result


def _rows(
    transposed: bool, expert_b: jax.Array, rows_b: jax.Array, x_RD: jax.Array, w_XDF: jax.Array
) -> jax.Array:
    """Multiply the first `rows_b` rows of each block by its expert's matrix; zeros in the rest."""

    def multiply(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        expert, rows, x_rD = block
        w = w_XDF[expert]
        y_rF = x_rD @ (w.T if transposed else w)
        return jnp.where(jnp.arange(len(x_rD))[:, None] < rows, y_rF, 0)

    x_brD = x_RD.reshape(len(expert_b), -1, x_RD.shape[1])
    y_brF = lax.map(multiply, (expert_b, rows_b, x_brD))
    return y_brF.reshape(len(x_RD), -1)


def _outer(first_X: jax.Array, steps_X: jax.Array, x_RD: jax.Array, dy_RF: jax.Array) -> jax.Array:
    """Add up the outer products of rows in each expert's steps, which begin at `first_X`."""
    step_s = jnp.arange(len(x_RD) // STEP)[:, None]
    is_own_sX = (first_X[None] <= step_s) & (step_s < (first_X + steps_X)[None])

    def add(
        dw_XDF: jax.Array, step: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, None]:
        is_own_X, x_rD, dy_rF = step
        dw_DF = jnp.where(is_own_X.any(), x_rD.T @ dy_rF, 0)
        return dw_XDF.at[is_own_X.argmax()].add(dw_DF), None

    x_srD, dy_srF = (x.reshape(len(step_s), STEP, -1) for x in (x_RD, dy_RF))
    zeros_XDF = jnp.zeros((len(first_X), x_RD.shape[1], dy_RF.shape[1]), jnp.float32)
    return lax.scan(add, zeros_XDF, (is_own_sX, x_srD, dy_srF))[0]


def _rows_of_jax(outputs: int, sizes_X: jax.Array, x_RD: jax.Array, w_XDF: jax.Array) -> jax.Array:
    """Multiply rows by the matrix of their group; rows after the groups are unwritten, here NaN."""
    inputs = x_RD.shape[1]
    if inputs == outputs:
        raise HloError('a kernel of jax does not say whether its square matrices are transposed')
    w_XDF = w_XDF.mT if w_XDF.shape[1] == outputs else w_XDF
    is_row_R = jnp.arange(len(x_RD)) < sizes_X.sum()
    return jnp.where(is_row_R[:, None], lax.ragged_dot(x_RD, w_XDF, sizes_X), jnp.nan)


def _outer_of_jax(sizes_X: jax.Array, *rest: jax.Array) -> jax.Array:
    """Add up the outer products of the rows of each group."""
    x_RD, dy_RF = rest[-2:]
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return lax.ragged_dot_general(x_RD, dy_RF, sizes_X, dims)
