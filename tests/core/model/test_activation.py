"""Activations, dropout and the scale of queries round to 16 bits once, at their end."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.config.model import GATED
from megajax.core.model.activation import GATES, activate
from megajax.core.model.dropout import dropout, sequence_keys

SHAPES = dict.fromkeys(('gelu', 'gelu_tanh'), (2, 8, 64))
SHAPES |= dict.fromkeys(GATED, (2, 8, 2, 64))
HALF = jnp.bfloat16, jnp.float16


def inputs(activation: str, dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(0).normal(size=SHAPES[activation]), dtype)


def in_fp64(h: jax.Array, activation: str) -> np.ndarray:
    """The activation by its formula."""
    x = np.asarray(h, np.float64)
    gate, up = (x[:, :, 0], x[:, :, 1]) if activation in GATED else (x, 1.0)
    cubic = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    clamped = np.minimum(gate, 7)
    return {
        'gelu': gate * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) / 2,
        'gelu_tanh': gate * (1 + np.tanh(cubic)) / 2,
        'geglu': gate * (1 + np.tanh(cubic)) / 2 * up,
        'swiglu': gate / (1 + np.exp(-gate)) * up,
        'clamped_swiglu': (np.clip(up, -7, 7) + 1) * clamped / (1 + np.exp(-1.702 * clamped)),
    }[activation]


def test_what_the_config_calls_gated_has_a_gate() -> None:
    assert {*GATED} == {*GATES}


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('activation', SHAPES)
def test_an_activation_and_its_gradient_are_those_of_fp32_rounded_once(activation, dtype):
    h = inputs(activation, dtype)
    y, transposed = jax.vjp(lambda h: activate(h, activation), h)
    wide, wide_transposed = jax.vjp(lambda h: activate(h, activation), h.astype(jnp.float32))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, wide.astype(dtype))
    np.testing.assert_allclose(wide, in_fp64(h, activation), rtol=1e-5, atol=1e-5)
    dy = jnp.ones_like(y)
    np.testing.assert_array_equal(
        transposed(dy)[0], wide_transposed(dy.astype(jnp.float32))[0].astype(dtype)
    )


@pytest.mark.parametrize('activation', SHAPES)
def test_in_bf16_no_result_of_pytorch_or_megatron_is_nearer_to_the_exact_one(activation):
    torch = pytest.importorskip('torch', reason="needs PyTorch: pip install 'megajax[test-hf]'")
    h = inputs(activation, jnp.bfloat16)
    x = torch.tensor(np.asarray(h, np.float32)).bfloat16()
    exact, *theirs = judges(torch, activation)
    ours = torch.tensor(np.asarray(activate(h, activation), np.float32))

    def distance(y) -> float:
        return (y.double() - exact(x.double())).square().mean().sqrt().item()

    for judge in theirs:
        assert distance(ours) < 1.0001 * distance(judge(x))


def judges(torch, activation: str) -> list:
    """The function itself, exact for numbers of 64 bits, and as others compute it."""
    functional = torch.nn.functional
    if activation == 'swiglu':
        found = [lambda x: functional.silu(x[:, :, 0]) * x[:, :, 1]]
    elif activation == 'clamped_swiglu':  # as in transformers' gpt-oss

        def clamped(x):
            gate, up = x[:, :, 0].clamp(max=7), x[:, :, 1].clamp(-7, 7)
            return (up + 1) * gate * torch.sigmoid(1.702 * gate)

        found = [clamped]
    elif activation == 'geglu':
        found = [lambda x: functional.gelu(x[:, :, 0], approximate='tanh') * x[:, :, 1]]
    else:
        approximate = 'tanh' if activation == 'gelu_tanh' else 'none'
        found = [lambda x: functional.gelu(x, approximate=approximate)]
    try:
        from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu
    except ImportError:
        return found * 2
    megatron = {
        'swiglu': lambda x: fused_bias_swiglu.swiglu(x.flatten(-2)),
        'gelu_tanh': lambda x: fused_bias_gelu.bias_gelu(x.new_zeros(x.shape[-1]), x),
    }
    return [*found * 2, *(megatron[name] for name in megatron if name == activation)]


@pytest.mark.parametrize('dtype', HALF)
def test_what_dropout_keeps_is_divided_in_fp32(dtype):
    x = inputs('gelu', dtype)
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        key_B = sequence_keys(jax.random.key(0), jnp.arange(2))
        drop = jax.jit(lambda x, key_B: dropout(x, 0.1, key_B, jax.P(None, None)))
        kept = np.asarray(drop(x, key_B))
    is_kept = kept != 0
    assert 0.8 < is_kept.mean() < 0.97
    expected = (np.asarray(x, np.float32) / np.float32(0.9)).astype(dtype)
    np.testing.assert_array_equal(kept[is_kept], expected[is_kept])
