"""LayerNorm and RMSNorm with statistics in fp32, over the last dim."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import ModelConfig
from megajax.model.parameters import Parameters
from megajax.model.shard_copies import along_last
from megajax.parallel.layout import Layout


class LayerNorm(nnx.Module):
    """Subtract the mean, divide by the standard deviation, scale and shift.

    `dims` are the letters of the input's last two dims, such as `TD`.
    """

    def __init__(self, parameters: Parameters, *, dims: str, eps: float):
        self.layout, self.dims, self.eps = parameters.layout, dims, eps
        self.weight = parameters.make('weight')
        self.bias = parameters.make('bias')

    def __call__(self, x: jax.Array) -> jax.Array:
        vectors = self.weight[...], self.bias[...]
        return _layer_norm(x, *vectors, self.eps, self.dims, self.layout)


class RMSNorm(nnx.Module):
    """Divide by the root mean square and scale.

    `dims` are the letters of the input's last two dims, such as `TD`.
    """

    def __init__(self, parameters: Parameters, *, dims: str, eps: float):
        self.layout, self.dims, self.eps = parameters.layout, dims, eps
        self.weight = parameters.make('weight')

    def __call__(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.weight[...], self.eps, self.dims, self.layout)


def make_norm(config: ModelConfig, parameters: Parameters, dims: str = 'TD') -> LayerNorm | RMSNorm:
    """Make the norm that `config.norm` names, for inputs whose last two dims are `dims`."""
    kind: type[LayerNorm] | type[RMSNorm] = LayerNorm if config.norm == 'layernorm' else RMSNorm
    return kind(parameters, dims=dims, eps=config.norm_eps)


# Only x is saved for the backward pass: the rest is cheaper to recompute than to read.
@partial(jax.checkpoint, static_argnums=(3, 4, 5))
def _layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, dims: str, layout: Layout
) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    scale, shift = (along_last(vector, y, dims, layout) for vector in (weight, bias))
    return (y * scale + shift).astype(x.dtype)


@partial(jax.checkpoint, static_argnums=(2, 3, 4))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, dims: str, layout: Layout) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * along_last(weight, y, dims, layout)).astype(x.dtype)
