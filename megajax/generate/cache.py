"""A block that keeps the keys and values of the tokens it has read, so that the next token is one row of every product.

The cache lies where attention works: whole key/value heads, sharded over `model`, the rows over `data`; so it adds no communication, and
a token costs Megatron's two all-reduces a layer. Prompts of several lengths end at the same slot, and each row knows its first: all rows
then write the same slot, in place.

B batch, S sequence, D model, N query heads, K key/value heads, G query heads per key/value head, H head dim, T slots of the cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.model.attention import attend
from megajax.model.block import Block
from megajax.parallel.layout import by_group

Core = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, 'KeysValues']]


class KeysValues(NamedTuple):
    """What one layer keeps. Slots are the second last dim, so that the products of a token read it as it lies."""

    k_BKTH: jax.Array
    v_BKTH: jax.Array


def prefill(block: Block, x_BSD: jax.Array, position_BS: jax.Array, segment_BS: jax.Array, num_slots: int) -> tuple[jax.Array, KeysValues]:
    """The block on whole prompts, which fill the first S of `num_slots` slots; attention stays inside a segment."""

    def core(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> tuple[jax.Array, KeysValues]:
        return attend(q_BSNH, k_BSKH, v_BSKH, segment_BS=segment_BS), KeysValues(slots(k_BSKH), slots(v_BSKH))

    def slots(k_BSKH: jax.Array) -> jax.Array:
        k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
        return jnp.pad(k_BKSH, ((0, 0), (0, 0), (0, num_slots - k_BKSH.shape[2]), (0, 0)))

    return _run(block, x_BSD, position_BS, core)


def decode(
    block: Block, x_B1D: jax.Array, position_B1: jax.Array, cache: KeysValues, slot: jax.Array, first_B: jax.Array
) -> tuple[jax.Array, KeysValues]:
    """The block on one token of each row, at `slot`; it attends to the slots from the row's first on, and to itself.

    Returns the token's own keys and values [B, K, 1, H], for `write`.
    """

    def core(q_B1NH: jax.Array, k_B1KH: jax.Array, v_B1KH: jax.Array) -> tuple[jax.Array, KeysValues]:
        own = KeysValues(jnp.swapaxes(k_B1KH, 1, 2), jnp.swapaxes(v_B1KH, 1, 2))
        return _attend_to_cache(q_B1NH, cache, own, slot, first_B), own

    return _run(block, x_B1D, position_B1, core)


def write(cache: KeysValues, own: KeysValues, slot: jax.Array) -> KeysValues:
    """The cache with a token's keys and values at `slot`; in place where everything that reads the cache comes before `slot`."""
    return KeysValues(*(lax.dynamic_update_slice_in_dim(x, new, slot, axis=2) for x, new in zip(cache, own, strict=True)))


def _run(block: Block, x_BSD: jax.Array, position_BS: jax.Array, core: Core) -> tuple[jax.Array, KeysValues]:
    """`Block.__call__` without dropout and sequence parallelism, with a core of attention that keeps what it is given."""
    with jax.named_scope('attention'):
        q_BSNH, k_BSKH, v_BSKH = block.attention.heads(block.attention_norm(x_BSD), position_BS)
        with jax.named_scope('core'):
            o_BSNH, cache = core(q_BSNH, k_BSKH, v_BSKH)
        x_BSD = x_BSD + block.attention.out(o_BSNH)  # row-parallel, g: all-reduce
    with jax.named_scope('mlp'):
        return x_BSD + block.mlp(block.mlp_norm(x_BSD)), cache  # row-parallel, g: all-reduce


def _attend_to_cache(q_B1NH: jax.Array, cache: KeysValues, own: KeysValues, slot: jax.Array, first_B: jax.Array) -> jax.Array:
    """Attention of one query to the slots before its own and to its own key and value, softmax in fp32: o_B1NH."""
    batch, groups, num_slots, head_dim = cache.k_BKTH.shape
    q_BNH = q_B1NH[:, 0] * head_dim**-0.5
    q_BKGH = q_BNH.reshape(batch, groups, -1, head_dim, out_sharding=by_group(q_BNH))
    score_BKGT = jnp.einsum('bkgh,bkth->bkgt', q_BKGH, cache.k_BKTH, preferred_element_type=jnp.float32)
    slot_1T = jnp.arange(num_slots)[None]
    read_BT = (first_B[:, None] <= slot_1T) & (slot_1T < slot)
    score_BKGT = jnp.where(jnp.expand_dims(read_BT, (1, 2)), score_BKGT, jnp.finfo(jnp.float32).min)
    own_BKG1 = jnp.einsum('bkgh,bkth->bkgt', q_BKGH, own.k_BKTH, preferred_element_type=jnp.float32)
    weight_BKGT = jax.nn.softmax(jnp.concatenate([score_BKGT, own_BKG1], axis=-1), axis=-1).astype(q_B1NH.dtype)
    o_BKGH = jnp.einsum('bkgt,bkth->bkgh', weight_BKGT[..., :-1], cache.v_BKTH) + weight_BKGT[..., -1:] * own.v_BKTH
    return o_BKGH.reshape(q_B1NH.shape, out_sharding=jax.typeof(q_B1NH).sharding.spec)
