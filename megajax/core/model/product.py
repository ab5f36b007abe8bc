"""The matmul of every layer, and its two gradients.

Operands are in the compute dtype; the gradient of a weight is accumulated in fp32 and stays in
fp32, like Megatron's `main_grad`.
"""

from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P, lax
from jax.typing import DTypeLike

from megajax.core.model import grid
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.platform import accumulation_dtype, with_fast_rows
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import Layout


def product(
    equation: str,
    x: jax.Array,
    w: nnx.Variable[Any] | jax.Array | Slotted,
    layout: Layout,
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply x by a weight, which is cast to the dtype of x, as in `'BSF,FD->BTD'`.

    The letters give the shardings. If the weight's input dims are sharded over `model`, XLA reduces
    the partial sums; if the result has T instead of S, XLA reduce-scatters them over the sequence:
    Megatron's g. The same holds in the backward pass for the gradient of x, which is sharded like
    x: Megatron's f.
    """
    value = w.get_value() if isinstance(w, nnx.Variable) else w
    how = _How(equation, layout, x.dtype, dtype)
    if not isinstance(value, Slotted):
        return _product(x, value, None, how)
    how = how._replace(at_rest=value.at_rest, is_frozen=value.slot is None)
    return _product(x, value.weight, value.slot, how)


def partial_sums(
    equation: str, x: jax.Array, w: jax.Array, layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """Multiply like `product`, but leave the sum over `model` to `sum_over_shards`.

    Return [shard of the input dims, ...].
    """
    dims = parse(equation)
    return _partial(x, w, dims.x, dims.w, dims.x[-dims.num_summed :], layout, dtype)


def partial_gradient(
    equation: str, dy: jax.Array, w: jax.Array, layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """Return the gradient of x in `product`, before its sum over `model`.

    The result is [shard of the output dims, ...]. dy has the sharding of the matmul's result before
    it is scattered.
    """
    dims = parse(equation)
    return _partial(dy, w, dims.rows, dims.w, dims.w[dims.num_summed :], layout, dtype)


def sum_over_shards(y: jax.Array, dims: str, layout: Layout, dtype: DTypeLike) -> jax.Array:
    """Add partial sums [shard, ...] over `model`: all-reduce, or reduce-scatter if T is sharded."""
    return lax.reduce_sum(y, (0,), out_sharding=layout(dims)).astype(dtype)


def input_gradient(
    equation: str,
    dy: jax.Array,
    w: jax.Array,
    layout: Layout,
    dtype: DTypeLike,
    placed: str | None = None,
) -> jax.Array:
    """Return the gradient of x in a matmul, sharded by the dims `placed`, or else like x."""
    dims = parse(equation)
    outputs = tuple(range(dims.num_summed, w.ndim))
    of_dy = tuple(range(dy.ndim - len(outputs), dy.ndim))
    return dot(dy, w, (of_dy, outputs), layout(placed or dims.x), dtype)


def weight_gradient(equation: str, x: jax.Array, dy: jax.Array, layout: Layout) -> jax.Array:
    """Return the gradient of w in a matmul, in fp32."""
    dims = parse(equation)
    rows = tuple(range(x.ndim - dims.num_summed))
    return dot(x, dy, (rows, rows), layout(dims.w), jnp.float32)


def _partial(
    x: jax.Array,
    w: jax.Array,
    dims_x: str,
    dims_w: str,
    summed: str,
    layout: Layout,
    dtype: DTypeLike,
) -> jax.Array:
    """Contract the last dims of x with dims of w, separately for each shard's part."""
    (letter,) = (letter for letter in summed if layout.is_sharded(letter))
    x, w = (with_shards(y, dims, letter, layout) for y, dims in ((x, dims_x), (w, dims_w)))
    dims_x, dims_w = (dims.replace(letter, letter + '-') for dims in (dims_x, dims_w))
    parts = summed.replace(letter, '-')
    contracted = [dims_x.index(part) for part in parts], [dims_w.index(part) for part in parts]
    shards = (dims_x.index(letter),), (dims_w.index(letter),)
    rows, outputs = (
        ''.join(part for part in dims if part not in letter + parts) for dims in (dims_x, dims_w)
    )
    return lax.dot_general(
        x,
        w,
        (contracted, shards),
        preferred_element_type=accumulation_dtype(x, dtype),
        out_sharding=layout(letter + rows + outputs),
    )


def with_shards(x: jax.Array, dims: str, letter: str, layout: Layout) -> jax.Array:
    """Split the dim of a letter into its shards and each shard's part."""
    place, shards = dims.index(letter), layout.num_shards(letter)
    shape = *x.shape[:place], shards, x.shape[place] // shards, *x.shape[place + 1 :]
    return x.reshape(shape, out_sharding=layout(dims.replace(letter, letter + '-')))


class Equation(NamedTuple):
    """The dims of a matmul's operands and result.

    The last dims of x are the first dims of w, its input dims, and are summed.
    """

    x: str
    w: str
    out: str

    @property
    def num_summed(self) -> int:
        """The number of the input dims."""
        return sum(letter in self.w for letter in self.x)

    @property
    def rows(self) -> str:
        """The dims of the result before it is scattered: x's dims up to the inputs, w's outputs."""
        return self.x[: -self.num_summed] + self.w[self.num_summed :]


@cache
def parse(equation: str) -> Equation:
    """Return the dims of a matmul such as `'BSF,FD->BTD'`."""
    operands, out = equation.split('->')
    x, w = operands.split(',')
    return Equation(x, w, out)


class _How(NamedTuple):
    """The equation, shardings and dtypes of a matmul, and the kind of its weight."""

    equation: str
    layout: Layout
    operands: DTypeLike
    result: DTypeLike
    at_rest: bool = False  # whether the weight has to be gathered over `data`
    is_frozen: bool = False  # whether the weight gets no gradient

    def read(self, w: jax.Array) -> jax.Array:
        """Return the weight to multiply by."""
        w = w.astype(self.operands)
        return gather(w, parse(self.equation).w, self.layout) if self.at_rest else w


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: jax.Array, w: jax.Array, slot: jax.Array | None, how: _How) -> jax.Array:
    dims, layout, weight = parse(how.equation), how.layout, how.read(w)
    summed = tuple(range(x.ndim - dims.num_summed, x.ndim)), tuple(range(dims.num_summed))
    # no collective, except for the head with 2-D tensor parallelism: all-gather
    x = jax.reshard(x, layout(dims.x))
    *rows, last = x.shape[: x.ndim - dims.num_summed]
    with_zeros = with_fast_rows(x, len(rows), prod(rows) * last // layout.num_shards('B'))
    y = dot(with_zeros, weight, summed, layout(dims.out), how.result)
    return y if with_zeros is x else lax.slice_in_dim(y, 0, last, axis=len(rows))


Saved = tuple[jax.Array | None, jax.Array, tuple[()] | None]


def _forward(
    x: jax.Array, w: jax.Array, slot: jax.Array | None, how: _How
) -> tuple[jax.Array, Saved]:
    # Save w itself: a loop over layers has w already, but would save a copy of any array computed
    # from it. The gradient of x does not need x.
    saved = None if how.is_frozen else x, w, None if slot is None else ()
    return _product(x, w, slot, how), saved


def _backward(
    how: _How, saved: Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, has_slot = saved
    dims, layout, dtype = parse(how.equation), how.layout, how.operands
    dy, weight = gather_gradient(dy.astype(dtype), dims, layout), how.read(w)
    if x is None:
        return input_gradient(how.equation, dy, weight, layout, dtype), None, None
    if jax.typeof(x).sharding.spec != layout(dims.x):
        x = jax.reshard(x, layout(dims.x))
        dx = grid.input_gradient(dy, weight, dims.out[:-1], layout, dtype)
    else:
        dx = input_gradient(how.equation, dy, weight, layout, dtype)
    dw = weight_gradient(how.equation, x, dy, layout)
    return (dx, dw, None) if has_slot is None else (dx, None, dw)


_product.defvjp(_forward, _backward)


def gather_gradient(dy: jax.Array, dims: Equation, layout: Layout) -> jax.Array:
    """Return the gradient of a result, gathered over the sequence if that shards the result."""
    if layout(dims.out) != layout(dims.rows):  # SP: the result is sharded over the sequence
        # Gather once for both gradients. A cotangent that a loop carries has no sharding yet, and
        # Shardy would let its other readers, such as the residual stream, read the gathered array
        # and slice it. The barrier makes the gathered array a separate value.
        return jax.reshard(lax.optimization_barrier(dy), layout(dims.rows))
    return dy


def dot(
    x: jax.Array,
    w: jax.Array,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    out_sharding: P,
    dtype: DTypeLike,
) -> jax.Array:
    """Contract these dims of x and w, with a result in `dtype`."""
    y = lax.dot_general(
        x,
        w,
        (summed, ((), ())),
        preferred_element_type=accumulation_dtype(x, dtype),
        out_sharding=out_sharding,
    )
    return y.astype(dtype)
