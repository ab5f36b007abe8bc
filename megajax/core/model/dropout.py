"""Dropout whose masks are the same on every mesh and for every number of microbatches.

Each sequence of the global batch has its own key, so a mask depends only on the sequence, the layer
and the position of the dropout in it. A context shard has some positions of a sequence, and draws
the same bits for them as `jax.random.bernoulli` does for the entire sequence.
"""

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.extend.random import threefry2x32_p

from megajax.core.model.kernels import Dropped
from megajax.core.model.per_device import per_device
from megajax.core.parallel.layout import CONTEXT
from megajax.core.parallel.zigzag import position_at


def random_key(seed: int | jax.Array) -> jax.Array:
    """Return the key of a seed, whatever generator `jax_default_prng_impl` chooses.

    Only the numbers of Threefry, jax's default, are the same on every mesh.
    """
    return jax.random.key(seed, impl='threefry2x32')


def sequence_keys(key: jax.Array, row_B: jax.Array) -> jax.Array:
    """Return one key per sequence, from its index in the global batch; sharded like `row_B`."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_B)


def fold_in(key_B: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive the keys of one dropout from the keys of the model or of a layer.

    None, which means no dropout, stays None.
    """
    return None if key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(key_B)


def dropout(x: jax.Array, rate: float, key_B: jax.Array | None, row: P) -> jax.Array:
    """Zero each element of x [B, ...] with probability `rate` and scale the rest.

    Without keys, return x unchanged. `row` is the sharding of one row of x. On context shards x is
    [B, T, D].
    """
    if key_B is None or rate == 0:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1 - rate, x.shape[1:], out_sharding=row)

    if jax.typeof(x).sharding.mesh.shape.get(CONTEXT, 1) > 1:
        keep = _keep_on_shard(x, rate, key_B, row)
    else:
        keep = jax.vmap(draw)(key_B)
    # In fp32, because 16 bits have no number close to 1 / 0.9. Only `keep` is saved for the
    # backward pass.
    return (jnp.where(keep, x, 0).astype(jnp.float32) / (1 - rate)).astype(x.dtype)


def _keep_on_shard(x_BTD: jax.Array, rate: float, key_B: jax.Array, row: P) -> jax.Array:
    """Return the mask of a context shard's tokens, with the shape and sharding of x."""

    def of_device(key_B2: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array]:
        _, length, width = x_BTD.shape
        place_T = positions_of_shard(length, row[0])
        column_D = jnp.arange(width)
        draw = jax.vmap(lambda key: kept(key, place_T[:, None], column_D[None], width, rate))
        return (draw(key_B2),)

    def alone(_: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array]:
        return (jnp.ones(x_BTD.shape, bool),)

    on_devices = per_device(of_device, lambda specs: specs[1:], alone)
    (keep,) = on_devices(jax.random.key_data(key_B), lax.stop_gradient(x_BTD))
    return keep


class WeightDropout(NamedTuple):
    """Dropout of a device's attention weights, by sequence, head and token positions."""

    rate: float
    key_R2: jax.Array
    head_N: jax.Array  # the numbers of the device's heads
    length: int  # length of a sequence

    @classmethod
    def of(cls, q_RSNH: jax.Array, key_R2: jax.Array, rate: float) -> Self:
        """Return the dropout of a device's queries with the tokens of all context shards."""
        _, length, heads, _ = q_RSNH.shape
        head_N = lax.axis_index('model') * heads + jnp.arange(heads)
        return cls(rate, key_R2, head_N, length * lax.axis_size(CONTEXT))

    def positions(self, *, back: int = 0) -> jax.Array:
        """Return the positions [R, S] of the tokens of the shard `back` shards before this one."""
        length = self.length // lax.axis_size(CONTEXT)
        return jnp.tile(positions_of_shard(length, back=back), (len(self.key_R2), 1))

    def at(self, query_RS: jax.Array, key_RY: jax.Array) -> Dropped:
        """Return the dropout of a block of scores, given the positions of queries and keys.

        The block may repeat all sequences several times.
        """

        def of_row(key: jax.Array, query_S: jax.Array, key_Y: jax.Array) -> jax.Array:
            score_NS = self.head_N[:, None] * self.length + query_S[None]
            return kept(key, score_NS[..., None], key_Y[None, None], self.length, self.rate)

        key_R2 = jnp.tile(self.key_R2, (len(query_RS) // len(self.key_R2), 1))
        return Dropped(self.rate, jax.vmap(of_row)(key_R2, query_RS, key_RY))


def positions_of_shard(length: int, axis: str | None = None, *, back: int = 0) -> jax.Array:
    """Return the positions of a device's tokens in their sequences.

    If `axis` is given, the context shard's tokens are divided over that mesh axis. With `back`, the
    positions are of the tokens `back` shards before this one. Map this function over devices.
    """
    shards, parts = lax.axis_size(CONTEXT), lax.axis_size(axis) if axis else 1
    shard = (lax.axis_index(CONTEXT) - back) % shards
    part = shard * parts + (lax.axis_index(axis) if axis else 0)
    return position_at(part * length + jnp.arange(length), shards * parts * length, shards)


def kept(key_2: jax.Array, row: jax.Array, column: jax.Array, width: int, rate: float) -> jax.Array:
    """Return elements of `jax.random.bernoulli(key, 1 - rate, [..., width])`.

    `row` is an element's index in all dims before the last, flattened; it broadcasts against
    `column`, the index in the last dim. The sequence of random bits is Threefry's (`random_key`):
    element i comes from the hash of the 64-bit number i.
    """
    row, column = jnp.broadcast_arrays(row.astype(jnp.uint32), column.astype(jnp.uint32))
    high, low = _times(row, width)
    first, second = threefry2x32_p.bind(*key_2, high + (low + column < low), low + column)
    # A number in [0, 1) from 23 bits, as `jax.random.uniform` makes it.
    one_to_two = (first ^ second) >> 9 | jnp.float32(1).view(jnp.uint32)
    return one_to_two.view(jnp.float32) - 1 < jnp.float32(1 - rate)


def _times(x: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """Multiply 32-bit integers; return the high and the low 32 bits of the result."""
    (high, low), (by_high, by_low) = (x >> 16, x & 0xFFFF), divmod(factor, 1 << 16)
    inner = (low * by_low >> 16) + (high * by_low & 0xFFFF) + (low * by_high & 0xFFFF)
    outer = high * by_high + (high * by_low >> 16) + (low * by_high >> 16)
    return outer + (inner >> 16), x * factor
