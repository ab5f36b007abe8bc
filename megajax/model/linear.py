"""Megatron's pair of linear layers: a column-parallel product needs no communication, a row-parallel one ends in one reduction.

B batch, S sequence, D model; a weight is stored [contracted dims, made dims], the transpose of Megatron's.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P, lax

from megajax.model.product import product
from megajax.model.vector import along_last
from megajax.parallel.layout import Layout


class ColumnParallelLinear(nnx.Module):
    """x_BSD [batch, -, -] times a weight [D, *made] whose made dims are sharded over `model`: no communication forward.

    Backward, the gradient of x is reduced over `model`: that is Megatron's f.
    """

    def __init__(self, shape: tuple[int, ...], spec: P, *, bias: bool, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.spec = spec
        self.weight = nnx.Param(normal(key, shape, std, spec))
        self.bias = nnx.Param(jnp.zeros(shape[1:], out_sharding=layout.bias(spec))) if bias else None

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        y = product(x_BSD, self.weight[...], 1, self.layout.columns(x_BSD, self.spec), x_BSD.dtype)
        return y if self.bias is None else add_bias(y, jnp.expand_dims(self.bias[...], (0, 1)))


class RowParallelLinear(nnx.Module):
    """x [batch, -, *contracted] times a weight [*contracted, D] whose contracted dims are sharded over `model`.

    Forward, the partial sums are reduced over `model`: Megatron's g. The bias is replicated and added once, after that.
    """

    def __init__(self, shape: tuple[int, ...], spec: P, *, bias: bool, std: float, layout: Layout, key: jax.Array):
        self.layout = layout
        self.weight = nnx.Param(normal(key, shape, std, spec))
        self.bias = nnx.Param(jnp.zeros(shape[-1:], out_sharding=layout.vector_D)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        # g: all-reduce forward, nothing backward (SP: reduce-scatter forward, all-gather backward)
        y_BSD = product(x, weight, weight.ndim - 1, self.layout.residual_BSD(x), x.dtype)
        return y_BSD if self.bias is None else add_bias(y_BSD, along_last(self.bias[...], y_BSD))


def normal(key: jax.Array, shape: tuple[int, ...], std: float, spec: P) -> jax.Array:
    """N(0, std) in fp32, the same numbers whatever the mesh."""
    return std * jax.random.normal(key, shape, jnp.float32, out_sharding=spec)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """Add in fp32, so that the gradient of the bias is summed in fp32."""
    if y.dtype == jnp.float32 and jax.typeof(y).sharding.mesh.abstract_device.platform != 'cpu':
        # The bias stays out of cuBLAS's epilogue: XLA has put it along the wrong dim of a square result (openxla/xla#46897), and left it
        # unscaled where a factor followed (openxla/xla#46110). What reads the sum is a kernel of its own anyway.
        y = lax.optimization_barrier(y)
    return (y.astype(jnp.float32) + bias).astype(y.dtype)
