"""Rotary position embedding (Su et al., 2021).

A rotated pair has one element from each half of the rotated dims, as in GPT-NeoX, Llama and
Megatron. The rotated dims are all dims of a head, or its first ones (`rotary_fraction`). A position
has one number or, for tokens of images, several, and each pair is rotated by one of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.config import ModelConfig, RopeScaling


def rotate(
    q_RSNH: jax.Array,
    k_RSKH: jax.Array,
    position_RS: jax.Array | None,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys by their positions, with angles and multiplications in fp32.

    Positions are 0, 1, ... if None is given. With several numbers per position, they are [R, S,
    numbers].
    """
    position = jnp.arange(q_RSNH.shape[1])[None] if position_RS is None else position_RS
    position = position.astype(jnp.float32)
    if position.ndim == 3:
        of_each = position_frequencies(config)
        angle = sum(position[:, :, i, None] * of_each[None, None, i] for i in range(len(of_each)))
    else:  # one number, or with M-RoPE three equal ones
        assert config.position != 'rope_2d'
        frequency = frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        angle = position[:, :, None] * frequency[None, None]
    angle = jnp.expand_dims(angle, 2)  # the same for all heads
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    scaling = config.rope_scaling
    if scaling is not None and scaling.attention_factor != 1:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return _rotate(q_RSNH, cos, sin), _rotate(k_RSKH, cos, sin)


def position_frequencies(config: ModelConfig) -> jax.Array:
    """Return the angle by which each number of a position rotates each pair, fp32 [numbers, pairs].

    `mrope` and `rope_2d` have several numbers, of which only one rotates a pair. With `mrope`
    (Qwen3-VL, 2025), row and column each rotate every third pair up to the size of their section,
    and time rotates the others. With `rope_2d`, the row rotates the first half and the column the
    second half, with the same frequencies.
    """
    half = config.rotary_dim // 2
    if config.position == 'rope_2d':
        of_each = frequencies(half, config.rope_theta, None)
        zeros = jnp.zeros_like(of_each)
        return jnp.stack([jnp.concatenate([of_each, zeros]), jnp.concatenate([zeros, of_each])])
    frequency = frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
    pair = np.arange(half)
    number = np.zeros(half, np.int32)
    for i in (1, 2):
        number[(pair % 3 == i) & (pair < 3 * config.mrope_section[i])] = i
    return jnp.where(number == np.arange(3)[:, None], frequency[None], 0)


def frequencies(rotary_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Return the angle in radians by which each pair rotates per token, fp32 [pairs].

    `scaling` is applied as in Llama 3.1 (2024), YaRN (Peng et al., 2023) or LongRoPE (Ding et al.,
    2024).
    """
    half = rotary_dim // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    if scaling.type == 'linear':
        return frequency / scaling.factor
    if scaling.type == 'longrope':  # no sequence is longer than the original sequence length
        return frequency / np.array(scaling.short_factor, np.float32)
    unscaled: jax.Array | np.ndarray
    if scaling.type == 'yarn':
        unscaled = _unscaled_of_yarn(rotary_dim, theta, scaling)
    else:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # Full turns within the sequence length of the original training.
        turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
        unscaled = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


def _unscaled_of_yarn(rotary_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Return each pair's share of its own frequency, fp32 [pairs].

    It decreases linearly with the index of the pair, from the pair that makes `beta_fast` turns
    within the original sequence length to the pair that makes `beta_slow`.
    """

    def pair_with(turns: float) -> float:
        wavelength = scaling.original_max_seq_len / turns
        return rotary_dim / 2 * math.log(wavelength / (2 * math.pi)) / math.log(theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # transformers uses these limits, although they are not the first and the last pair.
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pair = np.arange(rotary_dim // 2, dtype=np.float32)
    return 1 - np.clip((pair - low) / (high - low or 0.001), 0, 1)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated, passed = jnp.split(x, [rotary_dim], axis=-1)
        return jnp.concatenate([_rotate(rotated, cos, sin), passed], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
