"""LayerNorm and RMSNorm with statistics in fp32, over the last dim."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.model.parameters import Parameters
from megajax.model.shard_copies import along_last
from megajax.parallel.layout import Layout

SAVED = 'statistics of a norm'


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


# For the backward pass x is saved, and the statistics, which are one or two numbers per token. With
# both, its kernel reads x once; without the statistics XLA writes an array in fp32 between two.
_saving = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SAVED))


@partial(_saving, static_argnums=(3, 4, 5))
def _layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, dims: str, layout: Layout
) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - checkpoint_name(y.mean(-1, keepdims=True), SAVED)
    scale, shift = (along_last(vector, y, dims, layout) for vector in (weight, bias))
    return (y * _inverse_rms(y, eps) * scale + shift).astype(x.dtype)


@partial(_saving, static_argnums=(2, 3, 4))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float, dims: str, layout: Layout) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * _inverse_rms(y, eps) * along_last(weight, y, dims, layout)).astype(x.dtype)


def _inverse_rms(y: jax.Array, eps: float) -> jax.Array:
    return lax.rsqrt(checkpoint_name(jnp.square(y).mean(-1, keepdims=True), SAVED) + eps)
