"""LayerNorm and RMSNorm with statistics in fp32, over the last dim or over all heads."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.config import ModelConfig
from megajax.core.model.parameters import Parameters
from megajax.core.model.shard_copies import along_last
from megajax.core.parallel.layout import Layout

SAVED = 'statistics of a norm'


class LayerNorm(nnx.Module):
    """Subtract the mean, divide by the standard deviation, scale and shift.

    The scale is 1 + w if the norm is zero-centered (Megatron's layernorm-1p). `dims` are the
    letters of the input's last two dims, such as `TD`.
    """

    def __init__(
        self, parameters: Parameters, *, dims: str, eps: float, zero_centered: bool = False
    ):
        self.layout, self.dims, self.eps = parameters.layout, dims, eps
        self.zero_centered = zero_centered
        self.weight = parameters.make('weight')
        self.bias = parameters.make('bias')

    def __call__(self, x: jax.Array) -> jax.Array:
        vectors = _gain(self.weight[...], self.zero_centered), self.bias[...]
        return _layer_norm(x, *vectors, self.eps, self.dims, self.layout)


class RMSNorm(nnx.Module):
    """Divide by the root mean square and scale, by 1 + w if it is zero-centered.

    `dims` are the letters of the input's last two dims, such as `TD`.
    """

    def __init__(
        self, parameters: Parameters, *, dims: str, eps: float, zero_centered: bool = False
    ):
        self.layout, self.dims, self.eps = parameters.layout, dims, eps
        self.zero_centered = zero_centered
        self.weight = parameters.make('weight')

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        return _rms_norm(x, weight, self.eps, self.dims, self.layout, self.zero_centered)


class RMSNormOverHeads(nnx.Module):
    """The RMSNorm of queries or keys over all heads, which are sharded over `model`.

    `norm_queries_and_keys` applies both norms at once.
    """

    def __init__(self, parameters: Parameters, *, eps: float, zero_centered: bool = False):
        self.layout, self.eps, self.zero_centered = parameters.layout, eps, zero_centered
        self.weight = parameters.make('weight')


def norm_queries_and_keys(
    q_RSKGH: jax.Array, k_RSKH: jax.Array, queries: RMSNormOverHeads, keys: RMSNormOverHeads
) -> tuple[jax.Array, jax.Array]:
    """Divide each token's queries, and its keys, by their root mean square, and scale.

    The sums of both are one all-reduce over `model`, of two numbers for each token, and so are the
    sums of the backward pass.
    """
    weights = queries.weight[...], keys.weight[...]
    settings = queries.eps, queries.layout, queries.zero_centered
    with jax.named_scope('qk_norm'):
        return _norm_over_heads(q_RSKGH, k_RSKH, *weights, *settings)


Norm = LayerNorm | RMSNorm


def make_norm(config: ModelConfig, parameters: Parameters, dims: str = 'TD') -> Norm:
    """Make the norm that `config.norm` names, for inputs whose last two dims are `dims`."""
    kind = LayerNorm if config.norm == 'layernorm' else RMSNorm
    return kind(parameters, dims=dims, eps=config.norm_eps, zero_centered=config.zero_centered_norm)


def make_head_norm(config: ModelConfig, parameters: Parameters) -> Norm | RMSNormOverHeads:
    """Make the norm of queries or keys that `config.qk_norm` names."""
    if config.norms_all_heads:
        return RMSNormOverHeads(
            parameters, eps=config.norm_eps, zero_centered=config.zero_centered_norm
        )
    return make_norm(config, parameters, 'Nh')


# x and the statistics, one or two numbers per token, are saved for the backward pass. With both,
# its kernel reads x once; without the statistics, XLA writes an fp32 array between two kernels.
_saving = partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SAVED))


@partial(_saving, static_argnums=(3, 4, 5))
def _layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float, dims: str, layout: Layout
) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y - checkpoint_name(y.mean(-1, keepdims=True), SAVED)
    scale, shift = (along_last(vector, y, dims, layout) for vector in (weight, bias))
    return (y * _inverse_rms(y, eps) * scale + shift).astype(x.dtype)


@partial(_saving, static_argnums=(2, 3, 4, 5))
def _rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, dims: str, layout: Layout, zero_centered: bool
) -> jax.Array:
    y, gain = x.astype(jnp.float32), _gain(weight, zero_centered)
    return (y * _inverse_rms(y, eps) * along_last(gain, y, dims, layout)).astype(x.dtype)


def _gain(weight: jax.Array, zero_centered: bool) -> jax.Array:
    return 1 + weight if zero_centered else weight


@partial(_saving, static_argnums=(4, 5, 6))
def _norm_over_heads(
    q_RSKGH: jax.Array,
    k_RSKH: jax.Array,
    weight_KGH: jax.Array,
    weight_KH: jax.Array,
    eps: float,
    layout: Layout,
    zero_centered: bool,
) -> tuple[jax.Array, jax.Array]:
    q, k = (x.astype(jnp.float32) for x in (q_RSKGH, k_RSKH))
    # `model` shards either the key/value heads or the dims within a head. The sharded dim is summed
    # last.
    is_within_heads = layout.is_sharded('H')
    own, shared = (2, 'H') if is_within_heads else (-1, 'K')
    of_queries = jnp.square(q).sum(3).sum(own) / weight_KGH.size
    of_keys = jnp.square(k).sum(own) / weight_KH.size
    # all-reduce forward, nothing backward
    mean_RS2 = checkpoint_name(jnp.stack([of_queries, of_keys], -1).sum(2), SAVED)
    inverse_RS2 = lax.rsqrt(mean_RS2 + eps)
    # nothing forward; all-reduce backward, once for the gradients of both numbers
    inverse = lax.broadcast_in_dim(
        inverse_RS2,
        (*q.shape[:2], q.shape[-1 if is_within_heads else 2], 2),
        (0, 1, 3),
        out_sharding=layout(f'RS{shared}-'),
    )
    of_queries, of_keys = (
        jnp.expand_dims(inverse[..., index], other)
        for index, other in ((0, (2, 3) if is_within_heads else (3, 4)), (1, own))
    )
    q = q * of_queries * jnp.expand_dims(_gain(weight_KGH, zero_centered), (0, 1))
    k = k * of_keys * jnp.expand_dims(_gain(weight_KH, zero_centered), (0, 1))
    return q.astype(q_RSKGH.dtype), k.astype(k_RSKH.dtype)


def _inverse_rms(y: jax.Array, eps: float) -> jax.Array:
    return lax.rsqrt(checkpoint_name(jnp.square(y).mean(-1, keepdims=True), SAVED) + eps)
