"""The matrix product of every layer, and its two gradients.

Operands are in the compute dtype; the gradient of a weight is accumulated in fp32 and stays in
fp32, like Megatron's `main_grad`.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P, lax
from jax.typing import DTypeLike

from megajax.model import grid
from megajax.model.at_rest import gather
from megajax.model.gradient_slot import Slotted
from megajax.parallel.layout import Layout


def product(
    equation: str,
    x: jax.Array,
    w: nnx.Variable[Any] | jax.Array,
    layout: Layout,
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply x by a weight, which is cast to the dtype of x, as in `'BSF,FD->BTD'`.

    The letters give the placements. Where the weight's input dims are sharded over `model`, XLA
    reduces the partial sums; where the result has T for S, it scatters them over the sequence:
    Megatron's g. The same holds in the backward pass for the gradient of x, which has the
    placement of x: Megatron's f.
    """
    value = w.get_value() if isinstance(w, nnx.Variable) else w
    if not isinstance(value, Slotted):
        return _product(x, value, None, equation, layout, dtype, False)
    if value.slot is None:
        return _frozen(x, value.weight, equation, layout, dtype, value.at_rest, x.dtype)
    return _product(x, value.weight, value.slot, equation, layout, dtype, value.at_rest)


class _Equation(NamedTuple):
    """The dims of a product's operands and result.

    The last dims of x are the first dims of w, its input dims, and are summed.
    """

    x: str
    w: str
    out: str

    @property
    def num_summed(self) -> int:
        return sum(letter in self.w for letter in self.x)

    @property
    def rows(self) -> str:
        """The dims of the result before it is scattered: the rows of x, the output dims of w."""
        return self.x[: -self.num_summed] + self.w[self.num_summed :]


@cache
def _parse(equation: str) -> _Equation:
    operands, out = equation.split('->')
    x, w = operands.split(',')
    return _Equation(x, w, out)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def _product(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
    at_rest: bool,
) -> jax.Array:
    dims = _parse(equation)
    summed = tuple(range(x.ndim - dims.num_summed, x.ndim)), tuple(range(dims.num_summed))
    weight = w.astype(x.dtype)
    if at_rest:
        weight = gather(weight, dims.w, layout)
    x = jax.reshard(x, layout(dims.x))  # nothing, but for the head of a grid: all-gather
    return _dot(x, weight, summed, layout(dims.out), dtype)


Saved = tuple[jax.Array, jax.Array, tuple[()] | None]


def _forward(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
    at_rest: bool,
) -> tuple[jax.Array, Saved]:
    # Save w itself: a loop over layers has it already, and would keep a copy of anything computed
    # from it.
    saved = x, w, None if slot is None else ()
    return _product(x, w, slot, equation, layout, dtype, at_rest), saved


def _backward(
    equation: str, layout: Layout, dtype: DTypeLike, at_rest: bool, saved: Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, has_slot = saved
    dims = _parse(equation)
    dy, weight = _gathered(dy.astype(x.dtype), dims, layout), w.astype(x.dtype)
    if at_rest:
        weight = gather(weight, dims.w, layout)
    if jax.typeof(x).sharding.spec != layout(dims.x):
        x = jax.reshard(x, layout(dims.x))
        dx = grid.input_gradient(dy, weight, dims.out[:-1], layout, x.dtype)
    else:
        dx = _input_gradient(dy, weight, dims, layout)
    rows = tuple(range(x.ndim - dims.num_summed))
    dw = _dot(x, dy, (rows, rows), layout(dims.w), jnp.float32)
    return (dx, dw, None) if has_slot is None else (dx, None, dw)


_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _frozen(
    x: jax.Array,
    w: jax.Array,
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
    at_rest: bool,
    x_dtype: DTypeLike,
) -> jax.Array:
    """The product with a weight that gets no gradient, for which x is not kept."""
    return _product(x, w, None, equation, layout, dtype, at_rest)


def _frozen_forward(x: jax.Array, w: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
    return _frozen(x, w, *rest), w


def _frozen_backward(
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
    at_rest: bool,
    x_dtype: DTypeLike,
    w: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, None]:
    dims, weight = _parse(equation), w.astype(x_dtype)
    if at_rest:
        weight = gather(weight, dims.w, layout)
    return _input_gradient(_gathered(dy.astype(x_dtype), dims, layout), weight, dims, layout), None


_frozen.defvjp(_frozen_forward, _frozen_backward)


def _gathered(dy: jax.Array, dims: _Equation, layout: Layout) -> jax.Array:
    """Return the gradient of a result with all of the sequence, if that is sharded."""
    if layout(dims.out) != layout(dims.rows):  # SP: the result is sharded over the sequence
        # Gather once for both gradients. A cotangent that a loop carries has no placement yet, and
        # Shardy would let its other readers, such as the residual stream, read the gathered array
        # and slice it. The barrier makes the gathered array a separate value.
        return jax.reshard(lax.optimization_barrier(dy), layout(dims.rows))
    return dy


def _input_gradient(dy: jax.Array, weight: jax.Array, dims: _Equation, layout: Layout) -> jax.Array:
    num_out = weight.ndim - dims.num_summed
    output_dims = (
        tuple(range(dy.ndim - num_out, dy.ndim)),
        tuple(range(dims.num_summed, weight.ndim)),
    )
    return _dot(dy, weight, output_dims, layout(dims.x), weight.dtype)


def _dot(
    x: jax.Array,
    w: jax.Array,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    out_sharding: P,
    dtype: DTypeLike,
) -> jax.Array:
    # XLA's CPU backend multiplies bf16 fast only into an fp32 result. Elsewhere the result, and
    # with it the reduction over `model`, is in the requested dtype.
    on_cpu = jax.typeof(x).sharding.mesh.abstract_device.platform == 'cpu'
    preferred = jnp.float32 if on_cpu else dtype
    y = lax.dot_general(
        x, w, (summed, ((), ())), preferred_element_type=preferred, out_sharding=out_sharding
    )
    return y.astype(dtype)
