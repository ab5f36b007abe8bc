"""Matmuls with a frozen weight and a low-rank adapter: y = x W + scale (x A) B (LoRA).

W is sharded over `model`, and so is one of A and B: B for a column-parallel W, A for a row-parallel
one. The other one is replicated, and each shard uses its own copy. Every shard then computes its
part of both matmuls and of both gradients of x. They are added before the sum over `model`, so
Megatron's f and g stay the only reductions of activations; the gradients of the copies are summed
once a step (`shard_copies.py`).

In fp8 only the matmul with W is in FP8. The adapter multiplies the same operands in 16 bits, so
those that sequence parallelism gathers are gathered in 16 bits, and rounded after that.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P, lax
from jax.typing import DTypeLike

from megajax.core.model import fp8, zero_sharding
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.parameters import Parameters
from megajax.core.model.platform import accumulation_dtype
from megajax.core.model.product import (
    Equation,
    gather_gradient,
    input_gradient,
    parse,
    partial_gradient,
    partial_sums,
    sum_over_shards,
    with_shards,
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


class _Product(NamedTuple):
    """A matmul with an adapter: the equation, the shardings, and the adapter's factor."""

    equation: str
    layout: Layout
    scale: float
    at_rest: bool  # whether the weight has to be gathered over `data`

    @property
    def dims(self) -> Equation:
        """The dims of the matmul with the weight."""
        return parse(self.equation)

    @property
    def is_column_parallel(self) -> bool:
        """Whether the weight's output dims are sharded over `model`, and not its input dims."""
        return self.sharded in self.dims.out

    @property
    def sharded(self) -> str:
        """The letter of the weight's dims that is sharded over `model`."""
        (letter,) = (letter for letter in self.dims.w if self.layout.is_sharded(letter))
        return letter

    def split(self, dims: str) -> str:
        """Return dims as einsum letters, with the sharded dim split into shards z and parts."""
        return dims.replace(self.sharded, f'z{self.sharded}').lower()

    def shards(self, x: jax.Array, dims: str) -> jax.Array:
        """Split the sharded dim of x into the shards and the part of each shard."""
        return with_shards(x, dims, self.sharded, self.layout)

    def copies(self, x: jax.Array, dims: str) -> jax.Array:
        """Return a replicated matrix with a copy for each shard, if it has none yet."""
        if x.ndim == 3:
            return x
        shape = x.shape[0], self.layout.num_shards(self.sharded), x.shape[1]
        return lax.broadcast_in_dim(x, shape, (0, 2), out_sharding=self.spec(dims))

    def spec(self, dims: str) -> P:
        """Return the sharding of an array; Z in its dims is a dim of shards."""
        letter = self.sharded
        return self.layout(dims.replace(letter, f'{letter}-').replace('Z', letter))

    def weight(self, w: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the weight to multiply by."""
        w = fp8.cast(w, dtype)
        # ZeRO-3: all-gather over data
        return zero_sharding.gather(w, self.dims.w, self.layout) if self.at_rest else w


# With fp8, the scales of a matmul's operands, and the slot of their counts (`fp8.py`).
Scaled = tuple[jax.Array, jax.Array] | None


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
    shards, the replicated one of A and B has a copy for each of them, in a dim before its last.
    With `scales`, x and the gradient of the result are rounded for the matmuls with the weight, if
    that is FP8, and their exponents are counted.
    """
    value = weight.get_value()
    frozen, is_at_rest = value, False
    if isinstance(value, Slotted):
        frozen, is_at_rest = value.weight, value.at_rest
    how = _Product(equation, layout, adapter.scale, is_at_rest)
    multiply = _column_parallel if how.is_column_parallel else _row_parallel
    scaled = None
    if scales is not None:
        value = scales.get_value()
        assert isinstance(value, Slotted)
        assert value.slot is not None
        scaled = value.weight, value.slot
    return multiply(x, frozen, adapter.A[...], adapter.B[...], scaled, how)


class _Operand(NamedTuple):
    """An operand of a matmul with the weight: as it multiplies, its scales and its counts."""

    value: jax.Array
    scale: jax.Array | None = None  # its scale times the weight's, if both are FP8
    counts: jax.Array | None = None

    @classmethod
    def of(
        cls, x: jax.Array, which: int, w: jax.Array, scales: jax.Array | None, layout: Layout
    ) -> '_Operand':
        """Round an operand for an FP8 weight; `which` is its index among the scales."""
        if scales is None:
            return cls(x)
        is_narrow = fp8.is_fp8(w)
        value = fp8.quantize(x, scales[which], fp8.FORMATS[which]) if is_narrow else x
        scale = scales[which] * scales[fp8.W] if is_narrow else None
        return cls(value, scale, fp8.count(value, scales[which], layout))

    def unscaled(self, y: jax.Array) -> jax.Array:
        """Divide a result of the matmul by the scales."""
        return y if self.scale is None else fp8.divided(y, self.scale)


def _counts(of_x: jax.Array | None, of_dy: jax.Array | None) -> tuple[None, jax.Array] | None:
    """Return the gradient of `Scaled`: the counts, as that of their slot."""
    if of_x is None or of_dy is None:
        return None
    return None, fp8.counts(of_x, of_dy)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _column_parallel(
    x_BSD: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: _Product
) -> jax.Array:
    return _column_forward(x_BSD, w, a, b, scaled, how)[0]


Saved = tuple[Any, ...]


def _column_forward(
    x_BSD: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: _Product
) -> tuple[jax.Array, Saved]:
    dtype, outputs = x_BSD.dtype, how.dims.w[1:]
    a_DZQ, b_z, out = (
        how.copies(a, 'DZQ').astype(dtype),
        how.shards(b, f'Q{outputs}'),
        how.split(outputs),
    )
    h_BSZQ = _einsum('bsd,dzq->bszq', x_BSD, a_DZQ, how.spec('BSZQ'))
    added = _einsum(f'bszq,q{out}->bs{out}', h_BSZQ, b_z.astype(dtype), how.spec(how.dims.out))
    narrow = _Operand.of(x_BSD, fp8.X, w, scaled and scaled[0], how.layout)
    y = unadapted(how.equation, narrow.value, how.weight(w, dtype), how.layout, dtype)
    y = narrow.unscaled(y)
    y += how.scale * added.reshape(y.shape, out_sharding=how.layout(how.dims.out))
    return y, (x_BSD, w, a, b, scaled and scaled[0], h_BSZQ, narrow.counts)


def _column_backward(how: _Product, saved: Saved, dy: jax.Array) -> tuple[Any, ...]:
    x_BSD, w, a, b, scales, h_BSZQ, of_x = saved
    dtype, outputs = x_BSD.dtype, how.dims.w[1:]
    a_DZQ, b_z, out = (
        how.copies(a, 'DZQ').astype(dtype),
        how.shards(b, f'Q{outputs}'),
        how.split(outputs),
    )
    dy_z = how.scale * how.shards(dy, how.dims.rows)
    dh_ZBSQ = _einsum(f'bs{out},q{out}->zbsq', dy_z, b_z.astype(dtype), how.spec('ZBSQ'))
    da_DZQ = _einsum('bsd,zbsq->dzq', x_BSD, dh_ZBSQ, how.spec('DZQ'), jnp.float32)
    db_z = _einsum(f'bszq,bs{out}->q{out}', h_BSZQ, dy_z, how.spec(f'Q{outputs}'), jnp.float32)
    narrow = _Operand.of(dy, fp8.DY, w, scales, how.layout)
    weight = how.weight(w, dtype)
    dx_ZBSD = partial_gradient(how.equation, narrow.value, weight, how.layout, dtype)
    dx_ZBSD = narrow.unscaled(dx_ZBSD)
    dx_ZBSD += _einsum('zbsq,dzq->zbsd', dh_ZBSQ, a_DZQ, how.spec('ZBSD'))
    # f: all-reduce over model, once for both matmuls
    dx_BSD = sum_over_shards(dx_ZBSD, how.dims.x, how.layout, dtype)
    return dx_BSD, None, *_like((da_DZQ, a), (db_z, b)), _counts(of_x, narrow.counts)


_column_parallel.defvjp(_column_forward, _column_backward)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _row_parallel(
    x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: _Product
) -> jax.Array:
    return _row_forward(x, w, a, b, scaled, how)[0]


def _row_forward(
    x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaled: Scaled, how: _Product
) -> tuple[jax.Array, Saved]:
    dtype, inputs = x.dtype, how.dims.w[:-1]
    a_z, b_QZD, into = (
        how.shards(a, f'{inputs}Q'),
        how.copies(b, 'QZD').astype(dtype),
        how.split(inputs),
    )
    x_z = how.shards(x, how.dims.x)
    h_ZBSQ = _einsum(f'bs{into},{into}q->zbsq', x_z, a_z.astype(dtype), how.spec('ZBSQ'))
    narrow = _Operand.of(x, fp8.X, w, scaled and scaled[0], how.layout)
    weight = how.weight(w, dtype)
    y_ZBSD = partial_sums(how.equation, narrow.value, weight, how.layout, dtype)
    y_ZBSD = narrow.unscaled(y_ZBSD)
    y_ZBSD += how.scale * _einsum('zbsq,qzd->zbsd', h_ZBSQ, b_QZD, how.spec('ZBSD'))
    # g: all-reduce over model, once for both matmuls (SP: reduce-scatter)
    y_BTD = sum_over_shards(y_ZBSD, how.dims.out, how.layout, dtype)
    return y_BTD, (x, w, a, b, scaled and scaled[0], h_ZBSQ, narrow.counts)


def _row_backward(how: _Product, saved: Saved, dy_BTD: jax.Array) -> tuple[Any, ...]:
    x, w, a, b, scales, h_ZBSQ, of_x = saved
    dtype, inputs = x.dtype, how.dims.w[:-1]
    a_z, b_QZD, into = (
        how.shards(a, f'{inputs}Q'),
        how.copies(b, 'QZD').astype(dtype),
        how.split(inputs),
    )
    x_z = how.shards(x, how.dims.x)
    dy_BSD = gather_gradient(dy_BTD, how.dims, how.layout)  # SP: all-gather
    dh_BSZQ = how.scale * _einsum('bsd,qzd->bszq', dy_BSD, b_QZD, how.spec('BSZQ'))
    da_z = _einsum(f'bs{into},bszq->{into}q', x_z, dh_BSZQ, how.spec(f'{inputs}Q'), jnp.float32)
    db_QZD = how.scale * _einsum('zbsq,bsd->qzd', h_ZBSQ, dy_BSD, how.spec('QZD'), jnp.float32)
    narrow = _Operand.of(dy_BSD, fp8.DY, w, scales, how.layout)
    dx = input_gradient(how.equation, narrow.value, how.weight(w, dtype), how.layout, dtype)
    dx = narrow.unscaled(dx)
    added = _einsum(f'bszq,{into}q->bs{into}', dh_BSZQ, a_z.astype(dtype), how.spec(how.dims.x))
    dx += added.reshape(dx.shape, out_sharding=how.layout(how.dims.x))
    return dx, None, *_like((da_z, a), (db_QZD, b)), _counts(of_x, narrow.counts)


_row_parallel.defvjp(_row_forward, _row_backward)


def _einsum(
    letters: str, x: jax.Array, y: jax.Array, spec: P, dtype: DTypeLike | None = None
) -> jax.Array:
    """Multiply into a result in `dtype`, by default the dtype of x."""
    dtype = dtype or x.dtype
    product = jnp.einsum(
        letters,
        x,
        y,
        preferred_element_type=accumulation_dtype(x, dtype),
        out_sharding=spec,
    )
    return product.astype(dtype)


def _like(*pairs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return each array of the first tree with the shape and sharding of its peer in the second."""
    of_a, of_b = (
        x.reshape(like.shape, out_sharding=jax.typeof(like).sharding.spec) for x, like in pairs
    )
    return of_a, of_b
