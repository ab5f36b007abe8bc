"""The matrix product of every layer, and its two gradients.

Operands are in the compute dtype; the gradient of a weight is accumulated and left in fp32, as
Megatron's main gradients are.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P, lax
from jax.typing import DTypeLike

from megajax.model.gradient_slot import Slotted
from megajax.parallel.layout import Layout


def product(
    equation: str,
    x: jax.Array,
    w: nnx.Variable[Any] | jax.Array,
    layout: Layout,
    dtype: DTypeLike,
) -> jax.Array:
    """Multiply x with a weight, which is cast to the dtype of x, as in `'BSF,FD->BTD'`.

    The letters give the placements. Where the contracted dims are sharded over `model`, XLA adds
    up the partial sums, and where the result has T for S it scatters them over the sequence:
    Megatron's g. The same holds in the backward pass for the gradient of x, which is placed as x
    is: Megatron's f.
    """
    value = w.get_value() if isinstance(w, nnx.Variable) else w
    weight, slot = (value.weight, value.slot) if isinstance(value, Slotted) else (value, None)
    return _product(x, weight, slot, equation, layout, dtype)


class _Equation(NamedTuple):
    """The dims of a product's operands and result; the last of x and the first of w are summed."""

    x: str
    w: str
    out: str

    @property
    def num_summed(self) -> int:
        return sum(letter in self.w for letter in self.x)

    @property
    def rows(self) -> str:
        """The result's dims, its rows as x has them."""
        return self.x[: -self.num_summed] + self.w[self.num_summed :]


@cache
def _parse(equation: str) -> _Equation:
    operands, out = equation.split('->')
    x, w = operands.split(',')
    return _Equation(x, w, out)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
) -> jax.Array:
    dims = _parse(equation)
    summed = tuple(range(x.ndim - dims.num_summed, x.ndim)), tuple(range(dims.num_summed))
    return _dot(x, w.astype(x.dtype), summed, layout(dims.out), dtype)


Saved = tuple[jax.Array, jax.Array, tuple[()] | None]


def _forward(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    equation: str,
    layout: Layout,
    dtype: DTypeLike,
) -> tuple[jax.Array, Saved]:
    # w as it is: a loop over layers has it already, and would keep a copy of anything made of it.
    saved = x, w, None if slot is None else ()
    return _product(x, w, slot, equation, layout, dtype), saved


def _backward(
    equation: str, layout: Layout, dtype: DTypeLike, saved: Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, has_slot = saved
    dims = _parse(equation)
    dy = dy.astype(x.dtype)
    if layout(dims.out) != layout(dims.rows):  # SP: the result is sharded over the sequence
        # Gathered once for both products. A cotangent that a loop carries has no placement of its
        # own yet, and Shardy would let its other readers, such as the residual stream, read the
        # gathered array and slice it: the barrier is a value of its own.
        dy = jax.reshard(lax.optimization_barrier(dy), layout(dims.rows))
    num_out = w.ndim - dims.num_summed
    of_out = tuple(range(dy.ndim - num_out, dy.ndim)), tuple(range(dims.num_summed, w.ndim))
    dx = _dot(dy, w.astype(x.dtype), of_out, layout(dims.x), x.dtype)
    rows = tuple(range(x.ndim - dims.num_summed))
    dw = _dot(x, dy, (rows, rows), layout(dims.w), jnp.float32)
    return (dx, dw, None) if has_slot is None else (dx, None, dw)


_product.defvjp(_forward, _backward)


def _dot(
    x: jax.Array,
    w: jax.Array,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    out_sharding: P,
    dtype: DTypeLike,
) -> jax.Array:
    # XLA's CPU backend multiplies bf16 fast only into an fp32 result; elsewhere the result, and
    # with it the reduction over `model`, is in the dtype that was asked for.
    on_cpu = jax.typeof(x).sharding.mesh.abstract_device.platform == 'cpu'
    preferred = jnp.float32 if on_cpu else dtype
    y = lax.dot_general(
        x, w, (summed, ((), ())), preferred_element_type=preferred, out_sharding=out_sharding
    )
    return y.astype(dtype)
