"""Self-attention with heads sharded over `model`.

B batch, S (and T) sequence, D model, N query heads, K key/value heads, G query heads per key/value head, C = G + 2, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.model.dropout import dropout
from megajax.model.flash import can_flash, flash_attention
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.norm import make_norm
from megajax.model.rotary import rotate
from megajax.parallel.layout import Layout, by_group


class Attention(nnx.Module):
    """Fused QKV (column-parallel), attention on whole heads, output projection (row-parallel).

    The columns of QKV are grouped by key/value head, [G queries, key, value] each, so that one product makes all three and its
    input's gradient is reduced over `model` once, not three times.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, recompute: bool, out_std: float, key: jax.Array):
        self.config, self.layout, self.recompute = config, layout, recompute
        hidden, heads, groups, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        qkv_key, out_key = jax.random.split(key)
        qkv_shape = (hidden, groups, config.queries_per_kv + 2, head_dim)
        self.qkv = ColumnParallelLinear(qkv_shape, layout.qkv_DKCH, bias=config.qkv_bias, std=config.init_std, layout=layout, key=qkv_key)
        self.out = RowParallelLinear(
            (heads, head_dim, hidden), layout.attention_out_NHD, bias=config.bias, std=out_std, layout=layout, key=out_key
        )
        self.query_norm = make_norm(config, head_dim) if config.qk_norm else None
        self.key_norm = make_norm(config, head_dim) if config.qk_norm else None

    def __call__(self, x_BSD: jax.Array, position_BS: jax.Array | None, segment_BS: jax.Array | None, key_B: jax.Array | None) -> jax.Array:
        """x_BSD whole and normed, to the residual placement; attention stays inside a segment where `segment_BS` is given."""
        q_BSNH, k_BSKH, v_BSKH = self.heads(x_BSD, position_BS)
        with jax.named_scope('core'):
            o_BSNH = attend(
                q_BSNH,
                k_BSKH,
                v_BSKH,
                segment_BS=segment_BS,
                causal=self.config.causal,
                rate=self.config.dropout,
                key_B=key_B,
                recompute=self.recompute,
            )
        return self.out(o_BSNH)  # row-parallel, g: all-reduce forward (SP: reduce-scatter)

    def heads(self, x_BSD: jax.Array, position_BS: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, normed and rotated, whole heads on each shard; also what a cache of keys and values holds."""
        q_BSNH, k_BSKH, v_BSKH = self._split_heads(self.qkv(x_BSD))  # column-parallel: no communication
        if self.query_norm is not None and self.key_norm is not None:
            q_BSNH, k_BSKH = self.query_norm(q_BSNH), self.key_norm(k_BSKH)
        if self.config.position == 'rope':
            q_BSNH, k_BSKH = rotate(q_BSNH, k_BSKH, position_BS, theta=self.config.rope_theta, scaling=self.config.rope_scaling)
        return q_BSNH, k_BSKH, v_BSKH

    def _split_heads(self, qkv_BSKCH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, length, *_, head_dim = qkv_BSKCH.shape
        shape = batch, length, self.config.num_heads, head_dim
        q_BSNH = qkv_BSKCH[:, :, :, :-2].reshape(shape, out_sharding=self.layout.split_BSNH(qkv_BSKCH))
        k_BSKH, v_BSKH = qkv_BSKCH[:, :, :, -2], qkv_BSKCH[:, :, :, -1]
        if self.layout.shard_kv_heads:
            return q_BSNH, k_BSKH, v_BSKH
        # Fewer key/value heads than shards: QKV holds a slice of every head. Megatron gathers it whole; here the queries change
        # places in an all-to-all, and only the few key/value heads are gathered.
        q_BSNH = jax.reshard(q_BSNH, self.layout.heads_BSNH(q_BSNH))
        return q_BSNH, self._copy_to_shards(k_BSKH), self._copy_to_shards(v_BSKH)

    def _copy_to_shards(self, k_BSKH: jax.Array) -> jax.Array:
        """One key/value head per shard: the one that the shard's query heads share."""
        shape, copies = k_BSKH.shape, self.layout.model_size // k_BSKH.shape[2]
        k_BSKH = jax.reshard(k_BSKH, self.layout.whole_BSKH(k_BSKH))  # all-gather
        k_BSKRH = jnp.broadcast_to(k_BSKH[:, :, :, None], (*shape[:3], copies, shape[3]))
        k_BSKH = k_BSKRH.reshape(*shape[:2], shape[2] * copies, shape[3])
        return jax.reshard(k_BSKH, self.layout.heads_BSNH(k_BSKH))  # nothing forward, all-gather backward


def attend(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segment_BS: jax.Array | None = None,
    causal: bool = True,
    rate: float = 0.0,
    key_B: jax.Array | None = None,
    recompute: bool = False,
) -> jax.Array:
    """Attention, softmax in fp32, on the fastest implementation that can do what is asked: o_BSNH, placed as q.

    `recompute` keeps nothing of the [S, S] scores for the backward pass (selective recomputation of Korthikanti et al., 2022).
    """
    platform = jax.typeof(q_BSNH).sharding.mesh.abstract_device.platform
    if (rate == 0 or key_B is None) and can_flash(platform, str(q_BSNH.dtype), q_BSNH.shape[-1]):
        return flash_attention(q_BSNH, k_BSKH, v_BSKH, segment_BS, causal)
    core = functools.partial(_attend_xla, causal=causal, rate=rate)
    return (jax.checkpoint(core, prevent_cse=False) if recompute else core)(q_BSNH, k_BSKH, v_BSKH, segment_BS, key_B)


def _attend_xla(
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_BS: jax.Array | None,
    key_B: jax.Array | None,
    *,
    causal: bool,
    rate: float,
) -> jax.Array:
    batch, length, heads, head_dim = q_BSNH.shape
    groups = k_BTKH.shape[2]
    grouped = batch, length, groups, heads // groups, head_dim
    scaled_BSNH = (q_BSNH.astype(jnp.float32) * head_dim**-0.5).astype(q_BSNH.dtype)  # 128**-0.5 has no close number in 16 bits
    q_BSKGH = scaled_BSNH.reshape(grouped, out_sharding=by_group(q_BSNH))
    score_BKGST = jnp.einsum('bskgh,btkh->bkgst', q_BSKGH, k_BTKH, preferred_element_type=jnp.float32)
    if (allowed := _allowed(length, segment_BS, causal=causal)) is not None:
        score_BKGST = jnp.where(allowed, score_BKGST, jnp.finfo(jnp.float32).min)
    weight_BKGST = dropout(jax.nn.softmax(score_BKGST, axis=-1), rate, key_B).astype(v_BTKH.dtype)
    o_BSKGH = jnp.einsum('bkgst,btkh->bskgh', weight_BKGST, v_BTKH)
    return o_BSKGH.reshape(q_BSNH.shape, out_sharding=jax.typeof(q_BSNH).sharding.spec)


def _allowed(length: int, segment_BS: jax.Array | None, *, causal: bool) -> jax.Array | None:
    """Which keys T a query S sees, in a shape that broadcasts against [B, K, G, S, T]; None where it sees all."""
    position = jnp.arange(length)
    earlier = jnp.expand_dims(position[:, None] >= position[None, :], (0, 1, 2)) if causal else None
    if segment_BS is None:
        return earlier
    same = jnp.expand_dims(segment_BS[:, :, None] == segment_BS[:, None, :], (1, 2))
    return same if earlier is None else earlier & same
