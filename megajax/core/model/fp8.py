"""FP8 matmuls, with a scale for each operand (Micikevicius et al., 2022).

Activations and weights are in e4m3, gradients in e5m2. A number is multiplied by the scale of its
tensor, a power of two, before it is rounded; the result is divided by both scales. The scales of a
step come from earlier steps (delayed scaling), so no matmul waits for a tensor's maximum on other
devices. With current scaling they come from the tensor itself: the scale of a weight at the start
of a step, and the scale of an activation or a gradient from the tokens of each data shard, after a
max-reduction over `model`.

A step records the exponent of each operand's amax. The record leaves the backward pass as the
gradient of the scales: a count for each exponent. Wherever gradients are added (over parts of the
batch, microbatches and devices), the largest exponent survives: it is the highest one with a count.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from megajax.core.counts.current_scaling import AMAX
from megajax.core.counts.declaration import Parameter, Role
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.per_device import per_device
from megajax.core.model.product import dot, gather_gradient, input_gradient, parse, weight_gradient
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import Layout

# the last exponent also counts numbers that are not finite
FIRST_EXPONENT, NUM_EXPONENTS = -96, 128
X, W, DY = range(3)  # the operands: input, weight, and gradient of the result
# The scales of a linear layer [operand]. Their gradient in a step is the counts [operand,
# exponent]; each tensor-parallel shard has its own.
SCALES = Parameter('L-', Role.SCALES)
COUNTS = Parameter('L--', Role.SCALES, summed='V')
# With current scaling, only the weight's scale is used, and nothing is counted.
CURRENT = Parameter('L-', Role.SCALES, is_frozen=True)


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
    """Cast x to a dtype, unless x is FP8, whose numbers mean nothing without their scale."""
    return x if is_fp8(x) else x.astype(dtype)


def quantize(x: jax.Array, scale: jax.Array, form: Format) -> jax.Array:
    """Multiply by the scale, clip to the format's range, and round.

    A number that is not finite becomes NaN; clipping would hide an infinity.
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
    """Return the counts [exponent] of a tensor or, if it has several shards, of each shard's part.

    The numbers that are counted are x divided by its scale. x is read as FP8, which is half the
    bytes of 16 bits; if a number was clipped, its exponent is only known to be higher.
    """
    is_copied = layout.num_shards('V') > 1
    dims = f'*{"-" * x.ndim}->*{"V" if is_copied else ""}'

    def of_part(x: jax.Array) -> tuple[jax.Array]:
        largest = jnp.max(jnp.abs(x.astype(jnp.float32)))
        return (jnp.expand_dims(largest, 0) if is_copied else largest,)

    (largest,) = per_device(of_part, lambda specs: (layout.like(specs[0], dims),))(x)
    return jax.nn.one_hot(place(largest / scale), NUM_EXPONENTS)


def amax(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Return the largest absolute value of an array, or of its parts along the other dims."""
    with jax.named_scope(AMAX):
        return jnp.max(jnp.abs(x), axis)  # all-reduce of the maxima over the shards of x


def scale_of(largest: jax.Array, form: Format) -> jax.Array:
    """Return the scales of tensors, given their largest absolute values; 1 for zeros."""
    # On the bits, because jax 0.12 cannot map jnp.ldexp over the data shards of a loop.
    above = form.top - exponent(largest.astype(jnp.float32))
    scale = lax.bitcast_convert_type((jnp.clip(above, -126, 127) + 127) << 23, jnp.float32)
    return jnp.where(largest > 0, scale, 1)


class Scaled(NamedTuple):
    """An operand ready to multiply, its scale, and the counts of the tensor before rounding."""

    value: jax.Array
    scale: jax.Array | None  # None if it is not FP8
    counts: jax.Array | None  # None with current scaling

    @classmethod
    def of(
        cls,
        x: jax.Array,
        which: int,
        w: jax.Array,
        scales: jax.Array,
        layout: Layout,
        *,
        is_current: bool,
    ) -> 'Scaled':
        """Round x, the operand with the index `which`, if the weight is FP8."""
        form = FORMATS[which]
        if is_current:
            scale = scale_of(amax(x), form)  # TP: all-reduce over model of one number
            return cls(quantize(x, scale, form), scale, None)
        scale = scales[which]
        value = quantize(x, scale, form) if is_fp8(w) else x
        return cls(value, scale if is_fp8(w) else None, count(value, scale, layout))


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
    """Multiply as `product.product` does, but in FP8; `placed` are the dims by which x is sharded.

    x and the gradient of the result are all-gathered in FP8. If the weight is not FP8, nothing is
    cast to FP8, and the exponents are only counted.
    """
    w, (scale, seen) = weight.get_value(), with_slot(scales)
    assert isinstance(w, Slotted)
    return _product(x, w.weight, w.slot, scale, seen, equation, layout, placed, w.at_rest)


def with_slot(scales: nnx.Variable[Any]) -> tuple[jax.Array, jax.Array | None]:
    """Return the scales of a matmul, and the slot for its counts or, with current scaling, None."""
    value = scales.get_value()
    return (value.weight, value.slot) if isinstance(value, Slotted) else (value, None)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _product(x: jax.Array, *rest: Any) -> jax.Array:
    return _forward(x, *rest)[0]


def _forward(
    x: jax.Array,
    w: jax.Array,
    slot: jax.Array | None,
    scales: jax.Array,
    seen: jax.Array | None,
    equation: str,
    layout: Layout,
    placed: str,
    at_rest: bool,
) -> tuple[jax.Array, Any]:
    dims = parse(equation)
    of_x = Scaled.of(x, X, w, scales, layout, is_current=seen is None)
    narrow = jax.reshard(of_x.value, layout(dims.x))  # SP: all-gather
    summed = tuple(range(x.ndim - dims.num_summed, x.ndim)), tuple(range(dims.num_summed))
    weight = gather(cast(w, x.dtype), dims.w, layout) if at_rest else w
    y = dot(narrow, weight, summed, layout(dims.out), x.dtype)
    if of_x.scale is not None:
        y = divided(y, of_x.scale * scales[W])
    kept = of_x.scale if seen is None else None  # delayed scales are arguments
    return y, (narrow, of_x.counts, kept, w, scales)


def _backward(
    equation: str, layout: Layout, placed: str, at_rest: bool, saved: Any, dy: jax.Array
) -> tuple[jax.Array, None, jax.Array, None, jax.Array | None]:
    x, of_x, kept, w, scales = saved
    dims, dtype = parse(equation), dy.dtype
    of_dy = Scaled.of(dy, DY, w, scales, layout, is_current=of_x is None)
    narrow = gather_gradient(of_dy.value, dims, layout)
    weight = gather(cast(w, dtype), dims.w, layout) if at_rest else w
    dx = input_gradient(equation, narrow, weight, layout, dtype, placed)
    dw = weight_gradient(equation, x, narrow, layout)
    if of_dy.scale is not None:
        scale = scales[X] if kept is None else kept
        dx, dw = divided(dx, of_dy.scale * scales[W]), divided(dw, scale * of_dy.scale)
    of_both = None if of_x is None or of_dy.counts is None else counts(of_x, of_dy.counts)
    return dx, None, dw, None, of_both


_product.defvjp(_forward, _backward)


def counts(of_x: jax.Array, of_dy: jax.Array) -> jax.Array:
    """Return the counts of a matmul's operands other than the weight.

    The weight is counted once per step, because it is the same for all sequences of a batch.
    """
    return jnp.stack([of_x, 0 * of_x, of_dy])


def divided(y: jax.Array, scale: jax.Array) -> jax.Array:
    """Divide a result by a power of two, which is exact."""
    return y * (1 / scale).astype(y.dtype)
