"""Attention cores with a KV cache, so that every matmul handles only the newest token.

The cache is sharded like attention: complete key/value heads over `model`, and sequences over
`data`. It therefore adds no communication, and a token costs Megatron's two all-reduces per layer.
Prompts of different lengths end at the same slot, so all sequences then write the same slot, in
place; each sequence stores the index of its first slot. A layer with a sliding window caches only
as many tokens as the window has: a new token replaces the token that has left the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.config import ModelConfig
from megajax.core.model.attention import Core, attend, softmax
from megajax.core.model.kernels import LOWEST, scaled
from megajax.core.model.row_major import row_major
from megajax.core.parallel.layout import Layout


class KeysValues(NamedTuple):
    """The cached keys and values of one layer.

    Cache positions are the second-to-last dim, so that a token's matmuls read the cache without a
    copy.
    """

    k_BKYH: jax.Array
    v_BKYH: jax.Array


def prefill(
    config: ModelConfig, layout: Layout, segment_BS: jax.Array, num_slots: int
) -> Core[KeysValues]:
    """Return the attention core for full prompts, each within its segment.

    It caches the prompts' keys and values, which fill the first of `num_slots` slots. If the
    layer's config has a window, it caches only the last tokens: slot s is stored at index s modulo
    the cache's length.
    """
    size = min(num_slots, config.window or num_slots)

    def core(
        q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, sinks_N: jax.Array | None
    ) -> tuple[jax.Array, KeysValues]:
        o_BSNH = attend(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            layout,
            scale=config.query_scale,
            segment_RS=segment_BS,
            window=config.window,
            sinks_N=sinks_N,
        )
        # On GPUs, XLA would write all caches after the last layer, and until then keep each layer's
        # queries, keys and values.
        kept = KeysValues(*(row_major(slots(x_BSKH)) for x_BSKH in (k_BSKH, v_BSKH)))
        return lax.optimization_barrier((o_BSNH, kept))

    def slots(k_BSKH: jax.Array) -> jax.Array:
        k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
        if (left_out := k_BKSH.shape[2] - size) > 0:
            return jnp.roll(k_BKSH[:, :, left_out:], left_out % size, axis=2)
        return jnp.pad(k_BKSH, ((0, 0), (0, 0), (0, -left_out), (0, 0)))

    return core


def decode(
    config: ModelConfig,
    layout: Layout,
    cache: KeysValues,
    slot: jax.Array,
    first_B: jax.Array,
    is_empty_BY: jax.Array | None = None,
) -> Core[KeysValues]:
    """Return the attention core for one token per sequence, at `slot`.

    The token attends to its sequence's slots that are in its window and not empty. The core returns
    the token's own keys and values [B, K, 1, H], for `write`.
    """
    slot_Y = jnp.arange(cache.k_BKYH.shape[2])
    is_read_Y = slot_Y < slot
    if config.window is not None:
        # The last slot before this one that was written to each cache position; negative if there
        # was none.
        slot_Y = slot - 1 - (slot - 1 - slot_Y) % len(slot_Y)
        is_read_Y = slot_Y > slot - config.window
    read_BY = (first_B[:, None] <= slot_Y[None]) & is_read_Y[None]
    if is_empty_BY is not None and config.window is not None:
        is_empty_BY = is_empty_BY.at[:, slot_Y].get(out_sharding=layout('B-'))
    if is_empty_BY is not None:
        read_BY &= ~is_empty_BY

    def core(
        q_B1NH: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array, sinks_N: jax.Array | None
    ) -> tuple[jax.Array, KeysValues]:
        own = KeysValues(jnp.swapaxes(k_B1KH, 1, 2), jnp.swapaxes(v_B1KH, 1, 2))
        scale = config.query_scale
        return _attend_to_cache(q_B1NH, cache, own, read_BY, sinks_N, layout, scale), own

    return core


def write(config: ModelConfig, cache: KeysValues, own: KeysValues, slot: jax.Array) -> KeysValues:
    """Return the cache with a token's keys and values at `slot`.

    The update is in place if everything that reads the cache comes before `slot`.
    """
    at = slot if config.window is None else slot % cache.k_BKYH.shape[2]
    return KeysValues(
        *(
            lax.dynamic_update_slice_in_dim(x, new, at, axis=2)
            for x, new in zip(cache, own, strict=True)
        )
    )


def _attend_to_cache(
    q_B1NH: jax.Array,
    cache: KeysValues,
    own: KeysValues,
    read_BY: jax.Array,
    sinks_N: jax.Array | None,
    layout: Layout,
    scale: float,
) -> jax.Array:
    """Return the attention o_B1NH of one query to the positions in `read_BY` and to itself.

    The query's own key and value are not in the cache yet. The softmax is in fp32.
    """
    grouped = *cache.k_BKYH.shape[:2], -1, cache.k_BKYH.shape[-1]
    q_BKGH = scaled(q_B1NH[:, 0], scale).reshape(grouped, out_sharding=layout('BN-h'))
    score_BKGY = jnp.einsum(
        'bkgh,bkyh->bkgy', q_BKGH, cache.k_BKYH, preferred_element_type=jnp.float32
    )
    allowed = jnp.expand_dims(read_BY, (1, 2))
    score_BKGY = jnp.where(allowed, score_BKGY, LOWEST)
    own_BKG1 = jnp.einsum('bkgh,bkyh->bkgy', q_BKGH, own.k_BKYH, preferred_element_type=jnp.float32)
    score_BKGY = jnp.concatenate([score_BKGY, own_BKG1], axis=-1)
    weight_BKGY = softmax(score_BKGY, sinks_N, layout).astype(q_B1NH.dtype)
    o_BKGH = jnp.einsum('bkgy,bkyh->bkgh', weight_BKGY[..., :-1], cache.v_BKYH)
    o_BKGH = o_BKGH + weight_BKGY[..., -1:] * own.v_BKYH
    return o_BKGH.reshape(q_B1NH.shape, out_sharding=layout('BsNh'))
