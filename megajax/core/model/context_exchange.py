"""The keys and values of other context shards, and the gradients that go back to them.

The results of attention to the keys of several shards are merged by their log-sum-exp.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.core.model.kernels import Kernel
from megajax.core.parallel.layout import CONTEXT

Pair = tuple[jax.Array, jax.Array]


class How(NamedTuple):
    """How a device computes attention."""

    kernel: Kernel
    is_ring: bool
    rate: float  # dropout rate


class Keys:
    """Keys and values of the other shards, one shard in each step."""

    def __init__(self, k: jax.Array, v: jax.Array, ring: bool):
        self._kv, self._ring = (k, v), ring
        if not ring:
            # all-gather over context
            self._gathered = tuple(lax.all_gather(x, CONTEXT) for x in self._kv)

    def of(self, step: int, done: list[jax.Array]) -> Pair:
        """Return the keys and values of the shard `step` shards before.

        `done` has one result for each block of keys so far.
        """
        if not self._ring:
            shard = (lax.axis_index(CONTEXT) - step) % lax.axis_size(CONTEXT)
            k, v = (lax.dynamic_index_in_dim(x, shard, keepdims=False) for x in self._gathered)
            return k, v
        # XLA would start all sends at once and hold everything that arrives in memory. Each send
        # therefore waits for a block, and overlaps with the block after it.
        if step > 1:
            self._kv, _ = lax.optimization_barrier((self._kv, done[step - 2]))
        self._kv = pass_on(self._kv)
        return self._kv


class Sums:
    """The gradients of all shards' keys and values, until each shard has its own.

    They are summed in fp32, and enter and leave the ring in the dtype of keys and values.
    """

    def __init__(self, dk: jax.Array, dv: jax.Array, ring: bool):
        self._ring, self._dtype = ring, dk.dtype
        self._sums: tuple[jax.Array, ...] = dk, dv
        if not ring:
            shape = lax.axis_size(CONTEXT), *dk.shape
            self._sums = (jnp.zeros(shape), jnp.zeros(shape))
            self.add(0, *(x.astype(jnp.float32) for x in (dk, dv)))

    def add(self, step: int, dk: jax.Array, dv: jax.Array) -> None:
        """Add gradients of the keys and values that `Keys.of` returned for this step."""
        if self._ring:
            self._sums = tuple(
                total.astype(jnp.float32) + x
                for total, x in zip(pass_on(self._sums), (dk, dv), strict=True)
            )
            return
        shard = (lax.axis_index(CONTEXT) - step) % lax.axis_size(CONTEXT)
        self._sums = tuple(
            lax.dynamic_update_index_in_dim(total, x, shard, 0)
            for total, x in zip(self._sums, (dk, dv), strict=True)
        )

    def collect(self) -> Pair:
        """Return the sums of this shard's own keys and values, in their dtype."""
        if self._ring:
            dk, dv = pass_on(tuple(x.astype(self._dtype) for x in self._sums))
            return dk, dv
        dk, dv = (  # reduce-scatter over context
            lax.psum_scatter(x, CONTEXT, scatter_dimension=0, tiled=True)[0].astype(self._dtype)
            for x in self._sums
        )
        return dk, dv


def pass_on(arrays: Any, step: int = 1) -> Any:
    """Send this shard's arrays to the shard `step` positions further around the ring."""
    shards = lax.axis_size(CONTEXT)
    pairs = [(i, (i + step) % shards) for i in range(shards)]
    # permute over context
    return jax.tree.map(lambda x: lax.ppermute(x, CONTEXT, pairs), arrays)


def merge(a: Pair, b: Pair) -> Pair:
    """Merge two outputs for the same queries on different keys, and their log-sum-exps."""
    (o_a, lse_a), (o_b, lse_b) = a, b
    lse = jnp.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (by_token(jnp.exp(x - lse))[..., None] for x in (lse_a, lse_b))
    return weight_a * o_a + weight_b * o_b.astype(jnp.float32), lse


def by_token(lse_RNS: jax.Array) -> jax.Array:
    """Return the log-sum-exp of each query as an array [R, S, N]."""
    return jnp.moveaxis(lse_RNS, 1, 2)
