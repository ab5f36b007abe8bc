"""Matmuls with a frozen weight and a low-rank adapter: y = x W + scale (x A) B (LoRA).

W is sharded over `model`, and so is one of A and B: B for a column-parallel W, A for a row-parallel
one. The other one is replicated, and each shard uses its own copy. Every shard then computes its
part of both matmuls and of both gradients of x. They are added before the sum over `model`, so
Megatron's f and g stay the only reductions of activations; the gradients of the copies are summed
once a step (`shard_copies.py`).

In fp8 only the matmul with W is in FP8. The adapter multiplies the same operands in 16 bits, so
sequence parallelism gathers them in 16 bits, and they are rounded to FP8 afterwards.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from megajax.core.model import fp8
from megajax.core.model.adapter_matmuls import ColumnParallel, RowParallel, like
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.parameters import Parameters
from megajax.core.model.product import (
    gather_gradient,
    input_gradient,
    parse,
    partial_gradient,
    partial_sums,
    sum_over_shards,
)
from megajax.core.model.product import product as unadapted
from megajax.core.parallel.layout import Layout

ADAPTER = 0x6C6F7261  # differs from every index that a key is split by


class Adapter(nnx.Module):
    """The matrices A [inputs, Q] and B [Q, outputs] that adapt a weight [inputs, outputs]."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.scale = parameters.adapter_scale
        # A key of its own: the weight's initial values are the same as without an adapter.
        self.A = parameters.make('A', jax.random.fold_in(key, ADAPTER))
        self.B = parameters.make('B')


def maybe(parameters: Parameters, *, key: jax.Array) -> Adapter | None:
    """Make the adapter of a linear layer, or return None if none is declared."""
    return Adapter(parameters['adapter'], key=key) if 'adapter' in parameters else None


# With fp8, the scales of a matmul's operands, and the slot of their counts (`fp8.with_slot`).
Scaled = tuple[jax.Array, jax.Array | None] | None


def product(
    equation: str,
    x: jax.Array,
    weight: nnx.Variable[Any],
    adapter: Adapter,
    layout: Layout,
    scales: nnx.Variable[Any] | None = None,
) -> jax.Array:
    """Multiply x by a frozen weight and by its adapter, in the dtype of x.

    The result is sharded and reduced like the result of `product.product`. If there are several
    shards, the replicated matrix (A or B) has a copy for each of them, in a dim before its last.
    With `scales`, the exponents of x and of the result's gradient are counted, and both are rounded
    to FP8 for the matmuls with the weight if the weight is FP8.
    """
    value = weight.get_value()
    frozen, is_at_rest = value, False
    if isinstance(value, Slotted):
        frozen, is_at_rest = value.weight, value.at_rest
    scaled = None if scales is None else fp8.with_slot(scales)
    given = x, frozen, adapter.A[...], adapter.B[...], scaled
    is_column_parallel = parse(equation).out != 'BTD'
    kind = ColumnParallel if is_column_parallel else RowParallel
    how = kind(equation, layout, adapter.scale, is_at_rest)
    return _column_parallel(*given, how) if is_column_parallel else _row_parallel(*given, how)


class _Operand(NamedTuple):
    """An operand of a matmul with the weight, its scale and its counts."""

    value: jax.Array
    scale: jax.Array | None = None  # its scale times the weight's, if both are FP8
    counts: jax.Array | None = None

    @classmethod
    def of(
        cls, x: jax.Array, which: int, w: jax.Array, scaled: Scaled, layout: Layout
    ) -> '_Operand':
        """Round an operand to FP8 if the weight is FP8; `which` is its index among the scales."""
        if scaled is None:
            return cls(x)
        scales, slot = scaled
        found = fp8.Scaled.of(x, which, w, scales, layout, is_current=slot is None)
        scale = None if found.scale is None else found.scale * scales[fp8.W]
        return cls(found.value, scale, found.counts)

    def unscaled(self, y: jax.Array) -> jax.Array:
        """Divide a result of the matmul by the scales."""
        return y if self.scale is None else fp8.divided(y, self.scale)


def _again(scales: jax.Array | None, counted: jax.Array | None) -> Scaled:
    """Return the scales in the form of the forward pass, with what it counted as the slot."""
    return None if scales is None else (scales, counted)


def _counts(of_x: jax.Array | None, of_dy: jax.Array | None) -> tuple[None, jax.Array] | None:
    """Return the gradient of `Scaled`: none for the scales, and the counts for their slot."""
    if of_x is None or of_dy is None:
        return None
    return None, fp8.counts(of_x, of_dy)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _column_parallel(
    x_BSD: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: ColumnParallel
) -> jax.Array:
    return _column_forward(x_BSD, w, a, b, scaled, how)[0]


Saved = tuple[Any, ...]


def _column_forward(
    x_BSD: jax.Array,
    w: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scaled: Scaled,
    how: ColumnParallel,
) -> tuple[jax.Array, Saved]:
    dtype = x_BSD.dtype
    h_BSZQ = how.hidden(x_BSD, a)
    narrow = _Operand.of(x_BSD, fp8.X, w, scaled, how.layout)
    y = unadapted(how.equation, narrow.value, how.weight(w, dtype), how.layout, dtype)
    y = narrow.unscaled(y) + how.outputs(h_BSZQ, b)
    return y, (x_BSD, w, a, b, scaled and scaled[0], h_BSZQ, narrow.counts)


def _column_backward(how: ColumnParallel, saved: Saved, dy: jax.Array) -> tuple[Any, ...]:
    x_BSD, w, a, b, scales, h_BSZQ, of_x = saved
    dtype = x_BSD.dtype
    dh_ZBSQ = how.hidden_gradient(dy, b)
    da_DZQ, db_z = how.of_a(x_BSD, dh_ZBSQ), how.of_b(h_BSZQ, dy)
    narrow = _Operand.of(dy, fp8.DY, w, _again(scales, of_x), how.layout)
    weight = how.weight(w, dtype)
    dx_ZBSD = partial_gradient(how.equation, narrow.value, weight, how.layout, dtype)
    dx_ZBSD = narrow.unscaled(dx_ZBSD) + how.inputs(dh_ZBSQ, a)
    # f: all-reduce over model, once for both matmuls
    dx_BSD = sum_over_shards(dx_ZBSD, how.dims.x, how.layout, dtype)
    return dx_BSD, None, *like((da_DZQ, a), (db_z, b)), _counts(of_x, narrow.counts)


_column_parallel.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _row_parallel(
    x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: RowParallel
) -> jax.Array:
    return _row_forward(x, w, a, b, scaled, how)[0]


def _row_forward(
    x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: RowParallel
) -> tuple[jax.Array, Saved]:
    dtype = x.dtype
    h_ZBSQ = how.hidden(x, a)
    narrow = _Operand.of(x, fp8.X, w, scaled, how.layout)
    weight = how.weight(w, dtype)
    y_ZBSD = partial_sums(how.equation, narrow.value, weight, how.layout, dtype)
    y_ZBSD = narrow.unscaled(y_ZBSD) + how.outputs(h_ZBSQ, b)
    # g: all-reduce over model, once for both matmuls (SP: reduce-scatter)
    y_BTD = sum_over_shards(y_ZBSD, how.dims.out, how.layout, dtype)
    return y_BTD, (x, w, a, b, scaled and scaled[0], h_ZBSQ, narrow.counts)


def _row_backward(how: RowParallel, saved: Saved, dy_BTD: jax.Array) -> tuple[Any, ...]:
    x, w, a, b, scales, h_ZBSQ, of_x = saved
    dy_BSD = gather_gradient(dy_BTD, how.dims, how.layout)  # SP: all-gather
    dh_BSZQ = how.hidden_gradient(dy_BSD, b)
    da_z, db_QZD = how.of_a(x, dh_BSZQ), how.of_b(h_ZBSQ, dy_BSD)
    narrow = _Operand.of(dy_BSD, fp8.DY, w, _again(scales, of_x), how.layout)
    dx = input_gradient(how.equation, narrow.value, how.weight(w, x.dtype), how.layout, x.dtype)
    dx = narrow.unscaled(dx) + how.inputs(dh_BSZQ, a)
    return dx, None, *like((da_z, a), (db_QZD, b)), _counts(of_x, narrow.counts)


_row_parallel.defvjp(_row_forward, _row_backward)
