"""Dropout whose masks are the same on every mesh and for every number of microbatches.

Each sequence of the global batch has its own key, so a mask depends only on the sequence, the layer
and the position of the dropout in it.
"""

import jax
import jax.numpy as jnp
from jax import P


def sequence_keys(key: jax.Array, row_B: jax.Array) -> jax.Array:
    """One key per sequence, from its index in the global batch; sharded like `row_B`."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(row_B)


def fold_in(key_B: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive the keys of one dropout from the keys of the model or of a layer.

    None, which means no dropout, stays None.
    """
    return None if key_B is None else jax.vmap(lambda key: jax.random.fold_in(key, index))(key_B)


def dropout(x: jax.Array, rate: float, key_B: jax.Array | None, row: P) -> jax.Array:
    """Zero each element of x [B, ...] with probability `rate` and scale the rest.

    Without keys, return x unchanged. `row` is the sharding of one row of x.
    """
    if key_B is None or rate == 0:
        return x

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.bernoulli(key, 1 - rate, x.shape[1:], out_sharding=row)

    keep = jax.vmap(draw)(key_B)
    # In fp32, because 1 / 0.9 has no close number in 16 bits. Only `keep` is saved for the backward
    # pass.
    return (jnp.where(keep, x, 0).astype(jnp.float32) / (1 - rate)).astype(x.dtype)
