"""Rotary position embedding (Su et al., 2021), on halves of the head dim as in GPT-NeoX, Llama and Megatron.

B batch, S sequence, N query heads, K key/value heads, H head dim.
"""

import jax
import jax.numpy as jnp


def rotate(q_BSNH: jax.Array, k_BSKH: jax.Array, position_BS: jax.Array | None, *, theta: float) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys by their positions, 0, 1, ... unless given; angles and products in fp32."""
    half = q_BSNH.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    position = jnp.arange(q_BSNH.shape[1])[None] if position_BS is None else position_BS
    angle = position[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return _rotate(q_BSNH, cos, sin), _rotate(k_BSKH, cos, sin)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
