"""Rotary position embedding (Su et al., 2021).

A pair that is rotated has one element from each half of the head dim, as in GPT-NeoX, Llama and
Megatron.
"""

import math

import jax
import jax.numpy as jnp

from megajax.config import RopeScaling


def rotate(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    position_RS: jax.Array | None,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys by their positions, with angles and products in fp32.

    Positions are 0, 1, ... unless given.
    """
    frequency = frequencies(q_RSNH.shape[-1], theta, scaling)
    position = jnp.arange(q_RSNH.shape[1])[None] if position_RS is None else position_RS
    angle = position[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return _rotate(q_RSNH, cos, sin), _rotate(k_RSKH, cos, sin)


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """The angle in radians by which each pair turns from one token to the next, fp32 [H / 2].

    `scaling` is applied as in Llama 3.1 (2024).
    """
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    if scaling.type == 'linear':
        return frequency / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Full turns within the sequence length of the original training.
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
    unscaled = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
