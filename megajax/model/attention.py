"""Self-attention with heads sharded over `model`."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.config import ModelConfig
from megajax.hardware.targets import is_nvidia
from megajax.model.dropout import dropout
from megajax.model.flash import can_flash, flash_attention
from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.norm import make_norm
from megajax.model.parameters import Parameters
from megajax.model.rotary import rotate
from megajax.parallel.layout import Layout

Kept = TypeVar('Kept')
# A function of queries, keys and values, with complete heads on each shard. It returns attention's
# output and whatever the caller wants to keep, such as keys and values for the next token.
Core = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Kept]]


class Attention(nnx.Module):
    """Fused QKV (column-parallel), attention on complete heads, output projection (row-parallel).

    The columns of QKV are grouped by key/value head, [G queries, key, value] each. So one product
    computes all three, and the gradient of its input is reduced over `model` once, not three times.
    """

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.config, self.layout = config, parameters.layout
        qkv_key, out_key = jax.random.split(key)
        self.qkv = ColumnParallelLinear(parameters['qkv'], key=qkv_key)
        self.out = RowParallelLinear(parameters['out'], key=out_key)
        self.query_norm, self.key_norm = (
            make_norm(config, parameters[name], 'Nh') if config.qk_norm else None
            for name in ('query_norm', 'key_norm')
        )

    def __call__(
        self, x_BSD: jax.Array, position_BS: jax.Array | None, core: Core[Kept]
    ) -> tuple[jax.Array, Kept]:
        """Return attention on the normed and gathered x_BSD, and the second result of `core`.

        The first is placed as the residual stream is.
        """
        qkv = self._heads(x_BSD, position_BS)
        with jax.named_scope('core'):
            o_BSNH, kept = core(*qkv)
        return self.out(o_BSNH), kept  # row-parallel, g: all-reduce forward (SP: reduce-scatter)

    def _heads(
        self, x_BSD: jax.Array, position_BS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, normed and rotated, with complete heads on each shard."""
        config = self.config
        q_BSNH, k_BSKH, v_BSKH = self._split(self.qkv(x_BSD))  # column-parallel: no communication
        if self.query_norm is not None and self.key_norm is not None:
            q_BSNH, k_BSKH = self.query_norm(q_BSNH), self.key_norm(k_BSKH)
        if config.position == 'rope':
            theta, scaling = config.rope_theta, config.rope_scaling
            q_BSNH, k_BSKH = rotate(q_BSNH, k_BSKH, position_BS, theta=theta, scaling=scaling)
        return q_BSNH, k_BSKH, v_BSKH

    def _split(self, qkv_BSKCH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        batch, length, *_, head_dim = qkv_BSKCH.shape
        shape = batch, length, self.config.num_heads, head_dim
        within_heads = self.layout.is_sharded('H')
        dims = 'BSnH' if within_heads else 'BSNh'
        q_BSNH = qkv_BSKCH[:, :, :, :-2].reshape(shape, out_sharding=self.layout(dims))
        k_BSKH, v_BSKH = qkv_BSKCH[:, :, :, -2], qkv_BSKCH[:, :, :, -1]
        if not within_heads:
            return q_BSNH, k_BSKH, v_BSKH
        # With fewer key/value heads than shards, QKV holds a slice of every head. Megatron gathers
        # all of QKV; here an all-to-all moves the queries, and only the few key/value heads are
        # gathered.
        q_BSNH = jax.reshard(q_BSNH, self.layout('BSNh'))
        return q_BSNH, self._copy_to_shards(k_BSKH), self._copy_to_shards(v_BSKH)

    def _copy_to_shards(self, k_BSKH: jax.Array) -> jax.Array:
        """Copy to each shard the key/value head that its query heads share."""
        batch, length, heads, head_dim = k_BSKH.shape
        copies = self.layout.num_shards('N') // heads
        k_BSKH = jax.reshard(k_BSKH, self.layout('BSkh'))  # all-gather
        shape = batch, length, heads, copies, head_dim
        k_BSKH = jnp.broadcast_to(k_BSKH[:, :, :, None], shape).reshape(
            batch, length, heads * copies, head_dim
        )
        return jax.reshard(k_BSKH, self.layout('BSNh'))  # nothing forward, all-gather backward


def attention_core(
    config: ModelConfig,
    layout: Layout,
    *,
    recompute: bool = False,
    segment_BS: jax.Array | None = None,
    key_B: jax.Array | None = None,
) -> Core[None]:
    """The core of training and evaluation: every token of a sequence at once, nothing to keep.

    Attention stays inside a segment where `segment_BS` is given. With `recompute` no [S, S] scores
    are saved for the backward pass (selective recomputation of Korthikanti et al., 2022).
    """

    def core(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, None]:
        return attend(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            layout,
            segment_BS=segment_BS,
            causal=config.causal,
            rate=config.dropout,
            key_B=key_B,
            recompute=recompute,
        ), None

    return core


def attend(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    layout: Layout,
    *,
    segment_BS: jax.Array | None = None,
    causal: bool = True,
    rate: float = 0.0,
    key_B: jax.Array | None = None,
    recompute: bool = False,
) -> jax.Array:
    """Attention o_BSNH with softmax in fp32, by the fastest implementation for these inputs."""
    device = jax.typeof(q_BSNH).sharding.mesh.abstract_device
    platform = 'gpu' if is_nvidia(device) else device.platform.replace('gpu', 'another gpu')
    without_dropout = rate == 0 or key_B is None
    if without_dropout and can_flash(platform, str(q_BSNH.dtype), q_BSNH.shape[-1]):
        return flash_attention(q_BSNH, k_BSKH, v_BSKH, segment_BS, causal)
    core = partial(_attend_xla, layout=layout, causal=causal, rate=rate)
    attend_xla = jax.checkpoint(core, prevent_cse=False) if recompute else core
    return attend_xla(q_BSNH, k_BSKH, v_BSKH, segment_BS, key_B)


def _attend_xla(
    q_BSNH: jax.Array,
    k_BYKH: jax.Array,
    v_BYKH: jax.Array,
    segment_BS: jax.Array | None,
    key_B: jax.Array | None,
    *,
    layout: Layout,
    causal: bool,
    rate: float,
) -> jax.Array:
    batch, length, heads, head_dim = q_BSNH.shape
    groups = k_BYKH.shape[2]
    grouped = batch, length, groups, heads // groups, head_dim
    # In fp32, because 128**-0.5 has no close number in 16 bits.
    scaled_BSNH = (q_BSNH.astype(jnp.float32) * head_dim**-0.5).astype(q_BSNH.dtype)
    q_BSKGH = scaled_BSNH.reshape(grouped, out_sharding=layout('BSN-h'))
    score_BKGSY = jnp.einsum(
        'bskgh,bykh->bkgsy', q_BSKGH, k_BYKH, preferred_element_type=jnp.float32
    )
    if (allowed := _allowed(length, segment_BS, causal=causal)) is not None:
        score_BKGSY = jnp.where(allowed, score_BKGSY, jnp.finfo(jnp.float32).min)
    weight_BKGSY = dropout(jax.nn.softmax(score_BKGSY, axis=-1), rate, key_B, layout('N-sy'))
    o_BSKGH = jnp.einsum('bkgsy,bykh->bskgh', weight_BKGSY.astype(v_BYKH.dtype), v_BYKH)
    return o_BSKGH.reshape(q_BSNH.shape, out_sharding=layout('BSNh'))


def _allowed(length: int, segment_BS: jax.Array | None, *, causal: bool) -> jax.Array | None:
    """A mask of the keys Y that each query S sees, to broadcast against [B, K, G, S, Y].

    None where a query sees all keys.
    """
    position = jnp.arange(length)
    earlier = None
    if causal:
        earlier = jnp.expand_dims(position[:, None] >= position[None, :], (0, 1, 2))
    if segment_BS is None:
        return earlier
    same = jnp.expand_dims(segment_BS[:, :, None] == segment_BS[:, None, :], (1, 2))
    return same if earlier is None else earlier & same
