"""Activations, computed in fp32 whatever the dtype of the model."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

CLAMP, SHARPNESS = 7.0, 1.702  # of gpt-oss


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
    return (up + 1) * gate * jax.nn.sigmoid(SHARPNESS * gate)


# Functions of the gate and the up-projection (Shazeer, 2020).
GATES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    'geglu': lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    'swiglu': lambda gate, up: jax.nn.silu(gate) * up,
    'clamped_swiglu': _clamped_swiglu,
}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def activate(h: jax.Array, activation: str) -> jax.Array:
    """Return GELU of h_BSF, or a gated activation of h [B, S, 2, F] = [gate, up], in h's dtype.

    The kernels of PyTorch and Megatron compute in fp32 too; in 16 bits even the constants of GELU
    would be rounded. Only h is saved for the backward pass, as in Megatron's fused kernels.
    """
    return _in_fp32(h, activation)


def _in_fp32(h: jax.Array, activation: str) -> jax.Array:
    x = h.astype(jnp.float32)
    if activation in GATES:
        return GATES[activation](x[:, :, 0], x[:, :, 1]).astype(h.dtype)
    return jax.nn.gelu(x, approximate=activation == 'gelu_tanh').astype(h.dtype)


def _forward(h: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    return _in_fp32(h, activation), h


def _backward(activation: str, h: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    _, transposed = jax.vjp(lambda h: _in_fp32(h, activation), h)
    (dh,) = transposed(dy)
    # The barrier keeps the gradient in the dtype of h. Without it XLA writes the gradient in fp32,
    # for the sum over tokens that is a bias's gradient, and casts it in a second kernel.
    return (lax.optimization_barrier(dh),)


activate.defvjp(_forward, _backward)
