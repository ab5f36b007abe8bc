"""LayerNorm and RMSNorm with statistics in fp32, over the last dim or over all heads."""

import math
from collections.abc import Callable
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


class NormOverHeads(nnx.Module):
    """The norm of queries or keys over all heads, which are sharded over `model`.

    With a bias it is a LayerNorm, otherwise an RMSNorm. `norm_queries_and_keys` applies both norms
    at once.
    """

    def __init__(self, parameters: Parameters, *, eps: float, zero_centered: bool = False):
        self.layout, self.eps, self.zero_centered = parameters.layout, eps, zero_centered
        self.weight = parameters.make('weight')
        self.bias = parameters.maybe('bias')

    def vectors(self) -> 'Vectors':
        """Return the weight and, if there is one, the bias."""
        return self.weight[...], None if self.bias is None else self.bias[...]


def norm_queries_and_keys(
    q_RSKGH: jax.Array, k_RSKH: jax.Array, queries: NormOverHeads, keys: NormOverHeads
) -> tuple[jax.Array, jax.Array]:
    """Norm each token's queries, and its keys, over all heads; scale, and shift by the biases.

    The sums of both are one all-reduce over `model`, of two numbers for each token, and so are the
    sums of the backward pass. LayerNorm has another one of each, for the means.
    """
    vectors = queries.vectors(), keys.vectors()
    settings = queries.eps, queries.layout, queries.zero_centered
    with jax.named_scope('qk_norm'):
        return _norm_over_heads(q_RSKGH, k_RSKH, vectors, *settings)


Norm = LayerNorm | RMSNorm


def make_norm(config: ModelConfig, parameters: Parameters, dims: str = 'TD') -> Norm:
    """Make the norm that `config.norm` names, for inputs whose last two dims are `dims`."""
    kind = LayerNorm if config.norm == 'layernorm' else RMSNorm
    return kind(parameters, dims=dims, eps=config.norm_eps, zero_centered=config.zero_centered_norm)


def make_head_norm(config: ModelConfig, parameters: Parameters) -> Norm | NormOverHeads:
    """Make the norm of queries or keys that `config.qk_norm` names."""
    if config.norms_all_heads:
        return NormOverHeads(
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


Vectors = tuple[jax.Array, jax.Array | None]  # the weight of a norm, and the bias of a LayerNorm


@partial(_saving, static_argnums=(3, 4, 5))
def _norm_over_heads(
    q_RSKGH: jax.Array,
    k_RSKH: jax.Array,
    vectors: tuple[Vectors, Vectors],
    eps: float,
    layout: Layout,
    zero_centered: bool,
) -> tuple[jax.Array, jax.Array]:
    both = q_RSKGH.astype(jnp.float32), k_RSKH.astype(jnp.float32)
    if vectors[0][1] is not None:
        means = _on_heads(_means(lambda x: x, *both, layout), *both, layout)
        both = both[0] - means[0], both[1] - means[1]
    inverse_RS2 = lax.rsqrt(_means(jnp.square, *both, layout) + eps)
    q, k = (
        _shifted(x * inverse * jnp.expand_dims(_gain(weight, zero_centered), (0, 1)), bias)
        for x, inverse, (weight, bias) in zip(
            both, _on_heads(inverse_RS2, *both, layout), vectors, strict=True
        )
    )
    return q.astype(q_RSKGH.dtype), k.astype(k_RSKH.dtype)


def _means(
    of: Callable[[jax.Array], jax.Array], q_RSKGH: jax.Array, k_RSKH: jax.Array, layout: Layout
) -> jax.Array:
    """Return the means [R, S, 2] of a function of each token's queries, and of its keys."""
    # `model` shards either the key/value heads or the dims within a head. The sharded dim is summed
    # last.
    own = 2 if layout.is_sharded('H') else -1
    of_queries = of(q_RSKGH).sum(3).sum(own) / math.prod(q_RSKGH.shape[2:])
    of_keys = of(k_RSKH).sum(own) / math.prod(k_RSKH.shape[2:])
    # all-reduce forward, nothing backward
    return checkpoint_name(jnp.stack([of_queries, of_keys], -1).sum(2), SAVED)


def _on_heads(
    x_RS2: jax.Array, q_RSKGH: jax.Array, k_RSKH: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """Return a number of each token's queries, and one of its keys, that broadcast against them."""
    is_within_heads = layout.is_sharded('H')
    own, shared = (2, 'H') if is_within_heads else (-1, 'K')
    # nothing forward; all-reduce backward, once for the gradients of both numbers
    spread = lax.broadcast_in_dim(
        x_RS2,
        (*q_RSKGH.shape[:2], q_RSKGH.shape[-1 if is_within_heads else 2], 2),
        (0, 1, 3),
        out_sharding=layout(f'RS{shared}-'),
    )
    of_queries = jnp.expand_dims(spread[..., 0], (2, 3) if is_within_heads else (3, 4))
    return of_queries, jnp.expand_dims(spread[..., 1], own)


def _shifted(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + jnp.expand_dims(bias, (0, 1))


def _inverse_rms(y: jax.Array, eps: float) -> jax.Array:
    return lax.rsqrt(checkpoint_name(jnp.square(y).mean(-1, keepdims=True), SAVED) + eps)
