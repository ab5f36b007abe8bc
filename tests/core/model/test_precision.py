"""What is computed in fp32 although the model computes in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import by_name, make_config, on_mesh

from megajax.core.counts.declaration import Parameter, Role
from megajax.core.model.linear import add_bias
from megajax.core.model.norm import LayerNorm, RMSNorm
from megajax.core.model.parameters import Parameters, cast_matrices
from megajax.core.parallel.layout import Layout
from megajax.core.train.step import init_state


@pytest.mark.parametrize('kind', [LayerNorm, RMSNorm])
def test_a_norm_of_bf16_is_that_of_fp32_rounded_once(kind):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(3, 1, size=(4, 8, 256)), jnp.bfloat16)
    config = make_config()
    declared = {name: Parameter('D', Role.VECTOR) for name in ('weight', 'bias')}
    with on_mesh(config):
        norm = kind(Parameters(declared, {'D': 256}, Layout.of(config)), dims='TD', eps=1e-5)
        norm.weight[...] = jnp.asarray(random.normal(size=256), jnp.float32)
        found, exact = norm(x), norm(x.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_a_bias_is_added_in_fp32_and_so_is_its_gradient_summed():
    y, bias = jnp.full((64, 64, 2), 256, jnp.bfloat16), jnp.array([[[1.0, 0.5 + 2**-12]]])
    with on_mesh(make_config()):
        found, pullback = jax.vjp(add_bias, y, bias)
        _, gradient = pullback(jnp.ones_like(found))
        [close], _ = jax.vjp(lambda y: [add_bias(y, jnp.full((1, 1, 2), 1 + 2**-12))], y)
    assert (found.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32)
    assert (gradient == 64 * 64).all()  # ones added up in bf16 stay at 256
    assert (
        close == 258
    ).all()  # above the middle of 256 and 258, which the bias in bf16 would not be


@pytest.mark.parametrize('name', ['gpt', 'llama', 'bert'])
def test_matrices_alone_are_computed_with_in_16_bits(name):
    config = make_config(name)
    layout = Layout.of(config)
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config)).params
        cast = jax.eval_shape(lambda params: cast_matrices(params, jnp.bfloat16, layout), params)
    matrices = {
        f'layers.{layer}.weight'
        for layer in ('attention.qkv', 'attention.out', 'mlp.up', 'mlp.down')
    } | {'embedding.table'}
    matrices |= {
        'gpt': set(),
        'llama': {'head'},
        'bert': {
            'masked_head.dense.weight',
            'order_head.pooler.weight',
            'order_head.classifier.weight',
        },
    }[name]
    dtypes = {path: x.dtype for path, x in by_name(cast).items()}
    assert {path for path, dtype in dtypes.items() if dtype == jnp.bfloat16} == matrices
    assert set(dtypes.values()) == {jnp.dtype('bfloat16'), jnp.dtype('float32')}
