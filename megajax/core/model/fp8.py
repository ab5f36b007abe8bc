"""FP8 matmuls, with a scale for each operand (Micikevicius et al., 2022).

Activations and weights are in e4m3, gradients in e5m2. A number is multiplied by the scale of its
tensor, a power of two, before it is rounded; the result is divided by both scales. The scales of a
step come from earlier steps (delayed scaling), so no matmul waits for a tensor's maximum on other
devices.

A step records the exponent of each operand's amax. It leaves the backward pass as the gradient of
the scales: a count for each exponent. Wherever gradients are added (over parts of the batch,
microbatches and devices), the largest exponent survives: it is the highest one with a count.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from megajax.core.counts.declaration import Parameter, Role
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.per_device import per_device
from megajax.core.model.product import dot, gather_gradient, output_dims, parse
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import Layout

FIRST_EXPONENT, NUM_EXPONENTS = -96, 128  # the last also counts numbers that are not finite
X, W, DY = range(3)  # the operands: input, weight, and gradient of the result
# The scales of a linear layer [operand]. In a step's backward pass: their counts [operand,
# exponent], of which each tensor-parallel shard has its own.
SCALES = Parameter('L-', Role.SCALES)
COUNTS = Parameter('L--', Role.SCALES, summed='V')


class Format(NamedTuple):
    """An 8-bit format, and the exponent that the largest number of a tensor is scaled to."""

    dtype: DTypeLike
    top: int  # leaves headroom: the format's maximum is 3.5 times as large


E4M3 = Format(jnp.float8_e4m3fn, 6)
E5M2 = Format(jnp.float8_e5m2, 13)
FORMATS = E4M3, E4M3, E5M2  # of the operands


def is_fp8(x: jax.Array) -> bool:
    """Whether an array is FP8."""
    return x.dtype in (E4M3.dtype, E5M2.dtype)


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Cast x to a dtype, unless it is FP8, whose numbers mean nothing without their scale."""
    return x if is_fp8(x) else x.astype(dtype)


def quantize(x: jax.Array, scale: jax.Array, form: Format) -> jax.Array:
    """Multiply by the scale, clip to the format's range, and round.

    A number that is not finite becomes NaN, so that it is not lost.
    """
    largest = float(jnp.finfo(form.dtype).max)
    scaled = x.astype(jnp.float32) * scale
    clipped = jnp.clip(scaled, -largest, largest) + 0 * scaled  # NaN where it is not finite
    # Without the barrier, XLA would pass unrounded fp32 to any operation that casts back, and write
    # it to memory.
    return lax.optimization_barrier(clipped.astype(form.dtype))


def exponent(x: jax.Array) -> jax.Array:
    """Return the exponents of fp32 numbers, 128 for those that are not finite, -127 for zero."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return (bits >> 23 & 255) - 127


def place(largest: jax.Array) -> jax.Array:
    """Return the index of each number's exponent in the counts, -1 for zeros."""
    return jnp.clip(exponent(largest) - FIRST_EXPONENT, -1, NUM_EXPONENTS - 1)


def count(x: jax.Array, scale: jax.Array | float, layout: Layout) -> jax.Array:
    """Return the counts of a tensor: [exponent], of each shard's part if there are several.

    They are of x divided by its scale. x is read as FP8, which is half the bytes: if a number was
    clipped, its exponent is only known to be higher.
    """
    is_copied = layout.num_shards('V') > 1
    dims = f'*{"-" * x.ndim}->*{"V" if is_copied else ""}'

    def of_part(x: jax.Array) -> tuple[jax.Array]:
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
        return (jnp.expand_dims(largest, 0) if is_copied else largest,)

    (largest,) = per_device(of_part, lambda specs: (layout.like(specs[0], dims),))(x)
    return jax.nn.one_hot(place(largest / scale), NUM_EXPONENTS)


class Quantized(NamedTuple):
    """An FP8 tensor, and the counts of the tensor from which it was rounded."""

    value: jax.Array
    counts: jax.Array


Operand = jax.Array | Quantized


def value(x: Operand) -> jax.Array:
    """Return the numbers to multiply with."""
    return x.value if isinstance(x, Quantized) else x


def product(
    equation: str,
    x: jax.Array,
    weight: nnx.Variable[Any],
    scales: nnx.Variable[Any],
    layout: Layout,
    placed: str,
) -> jax.Array:
    """Multiply as `product.product` does, in FP8; x is sharded as `placed`, its dims, says.

    x and the gradient of the result are all-gathered in FP8. If the weight is not FP8, nothing is
    cast to FP8, and the exponents are only counted.
    """
    w, scaled = weight.get_value(), scales.get_value()
    assert isinstance(w, Slotted)
    assert isinstance(scaled, Slotted)
    return _product(
        x, w.weight, w.slot, scaled.weight, scaled.slot, equation, layout, placed, w.at_rest
    )


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _product(x: jax.Array, *rest: Any) -> jax.Array:
    return _forward(x, *rest)[0]


def _forward(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    scales: jax.Array,
    seen: jax.Array,
    equation: str,
    layout: Layout,
    placed: str,
    at_rest: bool,
) -> tuple[jax.Array, Any]:
    dims = parse(equation)
    narrow = quantize(x, scales[X], E4M3) if is_fp8(w) else x
    of_x = count(narrow, scales[X], layout)
    narrow = jax.reshard(narrow, layout(dims.x))  # SP: all-gather
    summed = tuple(range(x.ndim - dims.num_summed, x.ndim)), tuple(range(dims.num_summed))
    weight = gather(cast(w, x.dtype), dims.w, layout) if at_rest else w
    y = dot(narrow, weight, summed, layout(dims.out), x.dtype)
    if is_fp8(w):
        y = divided(y, scales[X] * scales[W])
    return y, (narrow, w, scales, of_x)


def _backward(
    equation: str, layout: Layout, placed: str, at_rest: bool, saved: Any, dy: jax.Array
) -> tuple[jax.Array, None, jax.Array, None, jax.Array]:
    x, w, scales, of_x = saved
    dims, dtype = parse(equation), dy.dtype
    narrow = quantize(dy, scales[DY], E5M2) if is_fp8(w) else dy
    of_dy = count(narrow, scales[DY], layout)
    narrow = gather_gradient(narrow, dims, layout)
    weight = gather(cast(w, dtype), dims.w, layout) if at_rest else w
    dx = dot(narrow, weight, output_dims(narrow, weight, dims), layout(placed), dtype)
    rows = tuple(range(x.ndim - dims.num_summed))
    dw = dot(x, narrow, (rows, rows), layout(dims.w), jnp.float32)
    if is_fp8(w):
        dx, dw = divided(dx, scales[DY] * scales[W]), divided(dw, scales[X] * scales[DY])
    return dx, None, dw, None, counts(of_x, of_dy)


_product.defvjp(_forward, _backward)


def counts(of_x: jax.Array, of_dy: jax.Array) -> jax.Array:
    """Return the counts of a matmul's operands other than the weight.

    The weight is the same for all sequences of a batch, and is counted once a step.
    """
    return jnp.stack([of_x, 0 * of_x, of_dy])


def divided(y: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide a result by a power of two, which is exact."""
    return y * (1 / scale).astype(y.dtype)
