"""Activations, dropout and the scale of queries round to 16 bits once, at their end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.model.activation import activate
from megajax.model.dropout import dropout, sequence_keys

SHAPES = {'gelu': (2, 8, 64), 'gelu_tanh': (2, 8, 64), 'swiglu': (2, 8, 2, 64)}
HALF = jnp.bfloat16, jnp.float16


def inputs(activation: str, dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(0).normal(size=SHAPES[activation]), dtype)


@pytest.mark.parametrize('dtype', HALF)
@pytest.mark.parametrize('activation', SHAPES)
def test_an_activation_and_its_gradient_are_those_of_fp32_rounded_once(activation, dtype):
    h = inputs(activation, dtype)
    y, transposed = jax.vjp(lambda h: activate(h, activation), h)
    wide, wide_transposed = jax.vjp(lambda h: activate(h, activation), h.astype(jnp.float32))
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, wide.astype(dtype))
    dy = jnp.ones_like(y)
    np.testing.assert_array_equal(transposed(dy)[0], wide_transposed(dy.astype(jnp.float32))[0].astype(dtype))


@pytest.mark.parametrize('activation', ['gelu', 'gelu_tanh', 'swiglu'])
def test_the_results_in_bf16_are_those_of_pytorch(activation):
    torch = pytest.importorskip('torch', reason="needs PyTorch: pip install 'megajax[test-hf]'")
    h = inputs(activation, jnp.bfloat16)
    x = torch.tensor(np.asarray(h, np.float32)).bfloat16()
    if activation == 'swiglu':  # one kernel, as Megatron fuses it: nothing between is rounded
        gate, up = x[:, :, 0].float(), x[:, :, 1].float()
        y = (torch.nn.functional.silu(gate) * up).bfloat16()
    else:
        y = torch.nn.functional.gelu(x, approximate='tanh' if activation == 'gelu_tanh' else 'none')
    ours, theirs = np.asarray(activate(h, activation), np.float32), y.float().numpy()
    assert (ours == theirs).mean() > 0.99  # a sum of fp32 beside a tie may round otherwise
    np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize('dtype', HALF)
def test_what_dropout_keeps_is_divided_in_fp32(dtype):
    x = inputs('gelu', dtype)
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        kept = dropout(x, 0.1, sequence_keys(jax.random.key(0), jnp.arange(2)))
    is_kept = kept != 0
    assert 0.8 < is_kept.mean() < 0.97
    expected = (x.astype(jnp.float32) / 0.9).astype(dtype)
    np.testing.assert_array_equal(kept[is_kept], expected[is_kept])
