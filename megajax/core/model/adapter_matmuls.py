"""The matmuls of an adapter, forward and backward: h = x A, and scale h B.

`adapter.py` runs them with the matmuls of the weight, and the overlap schedule one by one.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.typing import DTypeLike

from megajax.core.model import fp8, zero_sharding
from megajax.core.model.platform import accumulation_dtype
from megajax.core.model.product import Equation, parse, with_shards
from megajax.core.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class AdaptedMatmul:
    """A matmul with an adapter: the equation, the shardings, and the adapter's factor.

    The methods of its two kinds are the adapter's matmuls, forward and backward.
    """

    equation: str
    layout: Layout
    scale: float
    at_rest: bool = False  # whether the weight has to be gathered over `data`

    @property
    def dims(self) -> Equation:
        """The dims of the matmul with the weight."""
        return parse(self.equation)

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

    def scaled(self, b: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return B times the factor in `dtype`; 16 bits could not represent the factor exactly."""
        return (self.scale * b).astype(dtype)

    def spec(self, dims: str) -> P:
        """Return the sharding of an array; Z in its dims is a dim of shards."""
        letter = self.sharded
        return self.layout(dims.replace(letter, f'{letter}-').replace('Z', letter))

    def weight(self, w: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the weight to multiply by."""
        w = fp8.cast(w, dtype)
        # ZeRO-3: all-gather over data
        return zero_sharding.gather(w, self.dims.w, self.layout) if self.at_rest else w


class ColumnParallel(AdaptedMatmul):
    """The adapter of a column-parallel weight; A is replicated."""

    def hidden(self, x_BSD: jax.Array, a: jax.Array) -> jax.Array:
        """Return h_BSZQ = x A."""
        return _einsum('bsd,dzq->bszq', x_BSD, self._a_DZQ(a, x_BSD.dtype), self.spec('BSZQ'))

    def outputs(self, h_BSZQ: jax.Array, b: jax.Array) -> jax.Array:
        """Return the adapter's addition to the result."""
        letters = f'bszq,q{self._out}->bs{self._out}'
        added = _einsum(letters, h_BSZQ, self._b_z(b, h_BSZQ.dtype), self.spec(self.dims.out))
        shape = *h_BSZQ.shape[:2], *b.shape[1:]
        return added.reshape(shape, out_sharding=self.layout(self.dims.out))

    def hidden_gradient(self, dy: jax.Array, b: jax.Array) -> jax.Array:
        """Return dh_ZBSQ, the gradient of h."""
        letters, b_z = f'bs{self._out},q{self._out}->zbsq', self._b_z(b, dy.dtype)
        return _einsum(letters, self.shards(dy, self.dims.rows), b_z, self.spec('ZBSQ'))

    def inputs(self, dh_ZBSQ: jax.Array, a: jax.Array) -> jax.Array:
        """Return the adapter's addition to the gradient of x, before its sum over the shards."""
        return _einsum('zbsq,dzq->zbsd', dh_ZBSQ, self._a_DZQ(a, dh_ZBSQ.dtype), self.spec('ZBSD'))

    def of_a(self, x_BSD: jax.Array, dh_ZBSQ: jax.Array) -> jax.Array:
        """Return the gradient of A."""
        return _einsum('bsd,zbsq->dzq', x_BSD, dh_ZBSQ, self.spec('DZQ'), jnp.float32)

    def of_b(self, h_BSZQ: jax.Array, dy: jax.Array) -> jax.Array:
        """Return the gradient of B."""
        letters, spec = f'bszq,bs{self._out}->q{self._out}', self.spec(f'Q{self.dims.w[1:]}')
        dy_z = self.shards(dy, self.dims.rows)
        return self.scale * _einsum(letters, h_BSZQ, dy_z, spec, jnp.float32)

    @property
    def _out(self) -> str:
        return self.split(self.dims.w[1:])

    def _a_DZQ(self, a: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self.copies(a, 'DZQ').astype(dtype)

    def _b_z(self, b: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self.shards(self.scaled(b, dtype), f'Q{self.dims.w[1:]}')


class RowParallel(AdaptedMatmul):
    """The adapter of a row-parallel weight; B is replicated."""

    def hidden(self, x: jax.Array, a: jax.Array) -> jax.Array:
        """Return h_ZBSQ = x A."""
        letters = f'bs{self._into},{self._into}q->zbsq'
        return _einsum(letters, self._x_z(x), self._a_z(a, x.dtype), self.spec('ZBSQ'))

    def outputs(self, h_ZBSQ: jax.Array, b: jax.Array) -> jax.Array:
        """Return the adapter's addition to the result, before its sum over the shards."""
        b_QZD = self._b_QZD(b, h_ZBSQ.dtype)
        return _einsum('zbsq,qzd->zbsd', h_ZBSQ, b_QZD, self.spec('ZBSD'))

    def hidden_gradient(self, dy_BSD: jax.Array, b: jax.Array) -> jax.Array:
        """Return dh_BSZQ, the gradient of h."""
        b_QZD = self._b_QZD(b, dy_BSD.dtype)
        return _einsum('bsd,qzd->bszq', dy_BSD, b_QZD, self.spec('BSZQ'))

    def inputs(self, dh_BSZQ: jax.Array, a: jax.Array) -> jax.Array:
        """Return the adapter's addition to the gradient of x."""
        letters, a_z = f'bszq,{self._into}q->bs{self._into}', self._a_z(a, dh_BSZQ.dtype)
        added = _einsum(letters, dh_BSZQ, a_z, self.spec(self.dims.x))
        shape = *dh_BSZQ.shape[:2], *a.shape[:-1]
        return added.reshape(shape, out_sharding=self.layout(self.dims.x))

    def of_a(self, x: jax.Array, dh_BSZQ: jax.Array) -> jax.Array:
        """Return the gradient of A."""
        letters, spec = f'bs{self._into},bszq->{self._into}q', self.spec(f'{self.dims.w[:-1]}Q')
        return _einsum(letters, self._x_z(x), dh_BSZQ, spec, jnp.float32)

    def of_b(self, h_ZBSQ: jax.Array, dy_BSD: jax.Array) -> jax.Array:
        """Return the gradient of B."""
        spec = self.spec('QZD')
        return self.scale * _einsum('zbsq,bsd->qzd', h_ZBSQ, dy_BSD, spec, jnp.float32)

    @property
    def _into(self) -> str:
        return self.split(self.dims.w[:-1])

    def _x_z(self, x: jax.Array) -> jax.Array:
        return self.shards(x, self.dims.x)

    def _a_z(self, a: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self.shards(a, f'{self.dims.w[:-1]}Q').astype(dtype)

    def _b_QZD(self, b: jax.Array, dtype: DTypeLike) -> jax.Array:
        return self.copies(self.scaled(b, dtype), 'QZD')


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


def like(*pairs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the first array of each pair with the shape and sharding of the second."""
    of_a, of_b = (
        x.reshape(like.shape, out_sharding=jax.typeof(like).sharding.spec) for x, like in pairs
    )
    return of_a, of_b
