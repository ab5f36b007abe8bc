"""LayerNorm and RMSNorm with statistics in fp32. D is the dim that is normalised."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import ModelConfig
from megajax.model.vector import along_last
from megajax.parallel.layout import Layout


class LayerNorm(nnx.Module):
    """Subtract the mean, divide by the standard deviation, scale and shift; weight and bias are replicated."""

    def __init__(self, size: int, *, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), out_sharding=Layout.vector_D))
        self.bias = nnx.Param(jnp.zeros((size,), out_sharding=Layout.vector_D))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _layer_norm(x, self.weight[...], self.bias[...], self.eps)


class RMSNorm(nnx.Module):
    """Divide by the root mean square and scale; the weight is replicated."""

    def __init__(self, size: int, *, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((size,), out_sharding=Layout.vector_D))

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.weight[...], self.eps)


def make_norm(config: ModelConfig, size: int) -> LayerNorm | RMSNorm:
    """The norm that `config.norm` names, over `size` elements."""
    kind: type[LayerNorm] | type[RMSNorm] = LayerNorm if config.norm == 'layernorm' else RMSNorm
    return kind(size, eps=config.norm_eps)


# Only x is kept for the backward pass; the rest is cheaper to compute again than to read.
@partial(jax.checkpoint, static_argnums=(3,))
def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * along_last(weight, y) + along_last(bias, y)).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * along_last(weight, y)).astype(x.dtype)
