"""GPT under Auto axes: no line says what is sent, only the weights and the batch have a place, and
XLA's partitioner does the rest.

The model of `megajax/core/model` in plain functional JAX, with its parameters by their names: fused
QKV, layers stacked and scanned, a tied embedding. `test_three_ways.py` holds it to megajax and to
Megatron by hand.

B batch, S (and T) sequence, D model, K key/value heads, G query heads per key/value head, C = G + 2
(G queries, one key, one value), H head dim, F feed-forward, V vocabulary (padded).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from megajax.core.config import ModelConfig

Weights = dict[str, jax.Array]
Constrain = Callable[[jax.Array], jax.Array]


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same devices and names, with Auto axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def place(arrays: Mapping[str, Any], mesh: Mesh) -> Weights:
    """Explicitly placed arrays, in the same places on a mesh with Auto axes."""
    return {
        name: jax.device_put(x, NamedSharding(mesh, x.sharding.spec)) for name, x in arrays.items()
    }


def layer_norm(x_BSD: jax.Array, weights: Weights, eps: float) -> jax.Array:
    """Over D."""
    mean, variance = x_BSD.mean(-1, keepdims=True), x_BSD.var(-1, keepdims=True)
    return (x_BSD - mean) * lax.rsqrt(variance + eps) * weights['weight'][None, None] + weights[
        'bias'
    ][None, None]


def attention(x_BSD: jax.Array, weights: Weights, config: ModelConfig) -> jax.Array:
    """Causal; one product makes queries, keys and values."""
    qkv_BSKCH = (
        jnp.einsum('bsd,dkch->bskch', x_BSD, weights['qkv.weight'])
        + weights['qkv.bias'][None, None]
    )
    return attention_out(
        qkv_BSKCH[:, :, :, :-2], qkv_BSKCH[:, :, :, -2], qkv_BSKCH[:, :, :, -1], weights, config
    )


def attention_out(
    q_BSKGH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, weights: Weights, config: ModelConfig
) -> jax.Array:
    """From queries, keys and values to the residual stream."""
    batch, length = q_BSKGH.shape[:2]
    score_BKGST = jnp.einsum('bskgh,btkh->bkgst', q_BSKGH, k_BSKH) / config.head_dim**0.5
    causal_ST = jnp.tril(jnp.ones((length, length), bool))
    weight_BKGST = jax.nn.softmax(
        jnp.where(causal_ST[None, None, None], score_BKGST, -jnp.inf), axis=-1
    )
    o_BSNH = jnp.einsum('bkgst,btkh->bskgh', weight_BKGST, v_BSKH).reshape(
        batch, length, config.num_heads, config.head_dim
    )
    return (
        jnp.einsum('bsnh,nhd->bsd', o_BSNH, weights['out.weight']) + weights['out.bias'][None, None]
    )


def mlp(x_BSD: jax.Array, weights: Weights) -> jax.Array:
    """Up, GELU, down."""
    h_BSF = jnp.einsum('bsd,df->bsf', x_BSD, weights['up.weight']) + weights['up.bias'][None, None]
    return (
        jnp.einsum('bsf,fd->bsd', jax.nn.gelu(h_BSF), weights['down.weight'])
        + weights['down.bias'][None, None]
    )


def layer(
    x_BSD: jax.Array, weights: Weights, config: ModelConfig, residual: Constrain = lambda x: x
) -> jax.Array:
    """One layer; `residual` may say where the residual stream lies."""
    h_BSD = layer_norm(x_BSD, under('attention.norm', weights), config.norm_eps)
    x_BSD = residual(x_BSD + attention(h_BSD, under('attention', weights), config))
    h_BSD = layer_norm(x_BSD, under('mlp.norm', weights), config.norm_eps)
    return residual(x_BSD + mlp(h_BSD, under('mlp', weights)))


def gpt_loss(
    weights: Weights,
    token_BS: jax.Array,
    label_BS: jax.Array,
    mask_BS: jax.Array,
    *,
    config: ModelConfig,
    residual: Constrain = lambda x: x,
) -> jax.Array:
    """From tokens to the mean loss of the tokens that count."""
    table_VD = weights['embedding.table']
    x_BSD = residual(table_VD[token_BS] + weights['position.table'][: token_BS.shape[1]][None])
    x_BSD, _ = lax.scan(
        lambda x_BSD, one: (layer(x_BSD, one, config, residual), None),
        x_BSD,
        under('layers', weights),
    )
    x_BSD = layer_norm(x_BSD, under('norm', weights), config.norm_eps)
    logit_BSV = jnp.einsum('bsd,vd->bsv', x_BSD, table_VD)
    is_token_V = jnp.arange(table_VD.shape[0]) < config.vocab_size
    logit_BSV = jnp.where(is_token_V[None, None], logit_BSV, -jnp.inf)
    label_logit_BS = jnp.take_along_axis(logit_BSV, label_BS[..., None], axis=-1)[..., 0]
    loss_BS = jax.nn.logsumexp(logit_BSV, axis=-1) - label_logit_BS
    return (loss_BS * mask_BS).sum() / mask_BS.sum()


def under(prefix: str, weights: Weights) -> Weights:
    """The weights of one module, by their names in it."""
    return {
        name.removeprefix(f'{prefix}.'): weight
        for name, weight in weights.items()
        if name.startswith(f'{prefix}.')
    }
