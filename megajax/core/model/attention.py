"""Self-attention with heads sharded over `model`."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import P

from megajax.core.config import ModelConfig
from megajax.core.counts.windows import block_of_window
from megajax.core.model import context, context_bidirectional, context_halo, flash
from megajax.core.model.context_heads import Masks, attend_by_heads
from megajax.core.model.dropout import dropout, fold_in
from megajax.core.model.kernels import LOWEST, causal_mask, scaled
from megajax.core.model.norm import Norm, NormOverHeads, make_head_norm, norm_queries_and_keys
from megajax.core.model.parameters import Parameters
from megajax.core.model.passes import attend_by
from megajax.core.model.rotary import rotate
from megajax.core.model.rows import NO_ROWS, Rows
from megajax.core.model.sublayer import Sublayer
from megajax.core.parallel.layout import CONTEXT, Layout

Kept = TypeVar('Kept')
# A function of queries, keys and values, with complete heads on each shard, and of attention sinks
# or None. It returns attention's output and whatever the caller wants to save, such as keys and
# values for the next token.
Core = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Kept]]


class Attention(Sublayer):
    """Fused QKV (column-parallel), attention on complete heads, output projection (row-parallel).

    The columns of QKV are grouped by key/value head, [G queries, key, value] each. One matmul thus
    computes all three, and the gradient of its input is reduced over `model` once, not three times.
    """

    SCOPE, LINEARS, KEY, MIXES_TOKENS = 'attention', ('qkv', 'out'), 1, True

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        super().__init__(config, parameters, key=key)
        self.query_norm, self.key_norm = (
            make_head_norm(config, parameters[name]) if config.qk_norm else None
            for name in ('query_norm', 'key_norm')
        )
        sinks_key = jax.random.fold_in(key, 2)
        self.sinks = parameters.make('sinks', sinks_key) if config.attention_sinks else None

    def middle(self, y: jax.Array, core: Core[Kept], rows: Rows) -> tuple[jax.Array, Kept]:
        """Return the attention of fused queries, keys and values, and the second result of core."""
        qkv_RSKCH = self.first.with_bias(y)
        heads = self._heads(qkv_RSKCH, _reshard(rows.position_BS, self.layout('RS')))
        with jax.named_scope('core'):
            return core(*heads, None if self.sinks is None else self.sinks[...])

    def _heads(
        self, qkv_RSKCH: jax.Array, position_RS: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return normed and rotated queries, keys and values; each shard has complete heads."""
        config = self.config
        queries, keys = self.query_norm, self.key_norm
        q_RSKGH, k_RSKH, v_RSKH = (
            qkv_RSKCH[:, :, :, :-2],
            qkv_RSKCH[:, :, :, -2],
            qkv_RSKCH[:, :, :, -1],
        )
        if isinstance(queries, NormOverHeads) and isinstance(keys, NormOverHeads):
            q_RSKGH, k_RSKH = norm_queries_and_keys(q_RSKGH, k_RSKH, queries, keys)
        q_RSNH, k_RSKH, v_RSKH = self._complete(q_RSKGH, k_RSKH, v_RSKH)
        if isinstance(queries, Norm) and isinstance(keys, Norm):
            q_RSNH, k_RSKH = queries(q_RSNH), keys(k_RSKH)
        if config.rotates:
            q_RSNH, k_RSKH = rotate(q_RSNH, k_RSKH, position_RS, config)
        return q_RSNH, k_RSKH, v_RSKH

    def _complete(
        self, q_RSKGH: jax.Array, k_RSKH: jax.Array, v_RSKH: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries, keys and values with complete heads on each shard."""
        shape = *q_RSKGH.shape[:2], -1, q_RSKGH.shape[-1]
        within_heads = self.layout.is_sharded('H')
        dims = 'RSnH' if within_heads else 'RSNh'
        q_RSNH = q_RSKGH.reshape(shape, out_sharding=self.layout(dims))
        if not within_heads:
            return q_RSNH, k_RSKH, v_RSKH
        # With fewer key/value heads than shards, QKV holds a slice of every head. Megatron gathers
        # all of QKV; here an all-to-all moves the queries, and only the few key/value heads are
        # gathered.
        q_RSNH = jax.reshard(q_RSNH, self.layout('RSNh'))
        return q_RSNH, self._copy_to_shards(k_RSKH), self._copy_to_shards(v_RSKH)

    def _copy_to_shards(self, k_RSKH: jax.Array) -> jax.Array:
        """Copy to each shard the key/value head that the shard's query heads share."""
        *outer, heads, size = k_RSKH.shape
        copies = self.layout.num_shards('N') // heads
        k_RSKH = jax.reshard(k_RSKH, self.layout('RSkh'))  # all-gather
        copied = jnp.broadcast_to(k_RSKH[:, :, :, None], (*outer, heads, copies, size))
        k_RSKH = copied.reshape(*outer, heads * copies, size)
        return jax.reshard(k_RSKH, self.layout('RSNh'))  # nothing forward, all-gather backward


def attention_core(
    config: ModelConfig,
    layout: Layout,
    rows: Rows = NO_ROWS,
    *,
    recompute: bool = False,
    exchange: str | None = None,
) -> Core[None]:
    """Return the core of training and evaluation, which gets whole sequences and has no cache.

    With `exchange`, tokens also attend to the tokens of other context shards (`context.py`). If the
    layer's `rows` have segments, attention stays within a segment. With `recompute` no [S, S]
    scores are saved for the backward pass (selective recomputation of Korthikanti et al., 2022).
    """
    segment_RS = _reshard(rows.segment_BS, layout('RS'))
    key_R = _reshard(fold_in(rows.key_B, 0), layout('R'))

    def core(
        q_RSNH: jax.Array, k_RSKH: jax.Array, v_RSKH: jax.Array, sinks_N: jax.Array | None
    ) -> tuple[jax.Array, None]:
        return attend(
            q_RSNH,
            k_RSKH,
            v_RSKH,
            layout,
            segment_RS=segment_RS,
            causal=config.causal,
            rate=config.attention_dropout,
            key_R=key_R,
            recompute=recompute,
            exchange=exchange,
            window=config.window,
            scale=config.query_scale,
            sinks_N=sinks_N,
        ), None

    return core


def attend(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    v_RSKH: jax.Array,
    layout: Layout,
    *,
    scale: float,
    segment_RS: jax.Array | None = None,
    causal: bool = True,
    rate: float = 0.0,
    key_R: jax.Array | None = None,
    recompute: bool = False,
    exchange: str | None = None,
    window: int | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Return attention o_RSNH, softmax in fp32, by the fastest implementation for these inputs.

    With a `window`, a token attends to the last `window` tokens, including itself. Each head may
    have a sink (`passes.py`).
    """
    mesh, tokens, halo = jax.typeof(q_RSNH).sharding.mesh, q_RSNH.shape[1], None
    if exchange in ('gather', 'ring') and window is not None:
        halo = window if window < tokens * mesh.shape[CONTEXT] else None
    # With a halo, the mask is of one of a shard's two chunks.
    masked_tokens = 0 if segment_RS is None else tokens if halo is None else tokens // 2
    has_dropout, kind = rate > 0 and key_R is not None, (str(q_RSNH.dtype), q_RSNH.shape[-1])
    has_flash = flash.can_flash(
        mesh.abstract_device, *kind, window, masked_tokens, has_dropout=has_dropout
    )
    if exchange is not None:
        key_R2 = jax.random.key_data(key_R) if key_R is not None and rate > 0 else None
        beside, kernel = (segment_RS, sinks_N, key_R2), 'cudnn' if has_flash else 'xla'
        if exchange == 'all_to_all':
            masks = Masks(causal, window)
            return attend_by_heads(
                q_RSNH, k_RSKH, v_RSKH, masks, layout, kernel, scale, *beside, rate
            )
        if halo is not None:
            passes = context_halo.passes(halo, kernel, scale, rate)
        else:
            to_all = context if causal else context_bidirectional
            passes = to_all.passes(exchange, kernel, scale, rate)
        return attend_by(passes, q_RSNH, k_RSKH, v_RSKH, *beside)
    if has_flash:
        passes = flash.passes(causal, window, scale)
        return attend_by(passes, q_RSNH, k_RSKH, v_RSKH, segment_RS, sinks_N)
    core = partial(_attend_xla, layout=layout, causal=causal, rate=rate, window=window, scale=scale)
    attend_xla = jax.checkpoint(core, prevent_cse=False) if recompute else core
    return attend_xla(q_RSNH, k_RSKH, v_RSKH, segment_RS, key_R, sinks_N)


def _attend_xla(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    segment_RS: jax.Array | None,
    key_R: jax.Array | None,
    sinks_N: jax.Array | None,
    *,
    layout: Layout,
    causal: bool,
    rate: float,
    window: int | None,
    scale: float,
) -> jax.Array:
    block = None if window is None else block_of_window(window, q_RSNH.shape[1])
    if window is not None and block is not None and not rate:
        return _attend_in_blocks(
            q_RSNH, k_RYKH, v_RYKH, segment_RS, sinks_N, layout, window, block, scale
        )
    score_RKGSY = _scores(q_RSNH, k_RYKH, layout, scale)
    allowed = _allowed(q_RSNH.shape[1], segment_RS, causal=causal, window=window)
    return _weighted(score_RKGSY, v_RYKH, allowed, key_R, sinks_N, layout, rate)


def _attend_in_blocks(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    segment_RS: jax.Array | None,
    sinks_N: jax.Array | None,
    layout: Layout,
    window: int,
    block: int,
    scale: float,
) -> jax.Array:
    """Return attention with a window; each block of queries reads its own and the previous keys.

    The arrays of scores grow linearly with the sequence, not with its square.
    """
    rows, length, *_ = q_RSNH.shape

    def in_blocks(x: jax.Array) -> jax.Array:
        shape = rows * (length // block), block, *x.shape[2:]
        return x.reshape(shape, out_sharding=jax.typeof(x).sharding.spec)

    def with_earlier(x: jax.Array) -> jax.Array:
        """Return each block joined to the one before it (the masked last block, for the first)."""
        earlier = jnp.roll(x, block, axis=1)
        return jnp.concatenate([in_blocks(earlier), in_blocks(x)], axis=1)

    place = jnp.arange(length).reshape(-1, block)  # [blocks, S]
    of_keys = jnp.concatenate([place - block, place], axis=1)  # [blocks, Y], first < 0
    behind = place[:, :, None] - of_keys[:, None, :]
    allowed = (behind >= 0) & (behind < window) & (of_keys[:, None, :] >= 0)
    allowed = jnp.tile(allowed, (rows, 1, 1))
    if segment_RS is not None:
        same = in_blocks(segment_RS)[:, :, None] == with_earlier(segment_RS)[:, None, :]
        allowed = jax.reshard(allowed, layout('RS-')) & same
    o_RSNH = attend_where(
        *(in_blocks(q_RSNH), with_earlier(k_RYKH), with_earlier(v_RYKH)),
        jnp.expand_dims(allowed, (1, 2)),
        None,
        sinks_N,
        layout=layout,
        rate=0.0,
        scale=scale,
    )
    return o_RSNH.reshape(q_RSNH.shape, out_sharding=layout('RSNh'))


def attend_where(
    q_RSNH: jax.Array,
    k_RYKH: jax.Array,
    v_RYKH: jax.Array,
    allowed: jax.Array,
    key_R: jax.Array | None,
    sinks_N: jax.Array | None = None,
    *,
    layout: Layout,
    rate: float,
    scale: float,
) -> jax.Array:
    """Return attention o_RSNH, softmax in fp32; each query attends to the `allowed` keys.

    `allowed` broadcasts against [R, K, G, S, Y].
    """
    score_RKGSY = _scores(q_RSNH, k_RYKH, layout, scale)
    return _weighted(score_RKGSY, v_RYKH, allowed, key_R, sinks_N, layout, rate)


def _scores(q_RSNH: jax.Array, k_RYKH: jax.Array, layout: Layout, scale: float) -> jax.Array:
    grouped = *q_RSNH.shape[:2], k_RYKH.shape[2], -1, q_RSNH.shape[-1]
    q_RSKGH = scaled(q_RSNH, scale).reshape(grouped, out_sharding=layout('RSN-h'))
    return jnp.einsum('rskgh,rykh->rkgsy', q_RSKGH, k_RYKH, preferred_element_type=jnp.float32)


def _weighted(
    score_RKGSY: jax.Array,
    v_RYKH: jax.Array,
    allowed: jax.Array | None,
    key_R: jax.Array | None,
    sinks_N: jax.Array | None,
    layout: Layout,
    rate: float,
) -> jax.Array:
    if allowed is not None:
        score_RKGSY = jnp.where(allowed, score_RKGSY, LOWEST)
    weight_RKGSY = softmax(score_RKGSY, sinks_N, layout)
    weight_RKGSY = dropout(weight_RKGSY, rate, key_R, layout('N-sy'))
    o_RSKGH = jnp.einsum('rkgsy,rykh->rskgh', weight_RKGSY.astype(v_RYKH.dtype), v_RYKH)
    shape = *o_RSKGH.shape[:2], -1, o_RSKGH.shape[-1]
    return o_RSKGH.reshape(shape, out_sharding=layout('RSNh'))


def softmax(score_RKG: jax.Array, sinks_N: jax.Array | None, layout: Layout) -> jax.Array:
    """Return the softmax over the dims after G, with the heads' sinks in its denominator."""
    if sinks_N is None:
        return jax.nn.softmax(score_RKG, axis=-1)
    shape = 1, score_RKG.shape[1], -1, *(1 for _ in score_RKG.shape[3:])
    sink_1KG = sinks_N.reshape(shape, out_sharding=layout('-N' + '-' * (len(shape) - 2)))
    largest = jnp.maximum(score_RKG.max(-1, keepdims=True), sink_1KG)
    largest = jax.lax.stop_gradient(largest)  # it cancels out
    weight_RKG = jnp.exp(score_RKG - largest)
    return weight_RKG / (weight_RKG.sum(-1, keepdims=True) + jnp.exp(sink_1KG - largest))


def _allowed(
    length: int, segment_RS: jax.Array | None, *, causal: bool, window: int | None
) -> jax.Array | None:
    """Return the mask of the keys Y that each query S attends to, or None for all keys.

    The mask broadcasts against [R, K, G, S, Y].
    """
    earlier = jnp.expand_dims(causal_mask(length, window), (0, 1, 2)) if causal else None
    if segment_RS is None:
        return earlier
    same = jnp.expand_dims(segment_RS[:, :, None] == segment_RS[:, None, :], (1, 2))
    return same if earlier is None else earlier & same


def _reshard(x: jax.Array | None, spec: P) -> jax.Array | None:
    return None if x is None else jax.reshard(x, spec)
