"""A column-parallel layer and a row-parallel one after it are two plain layers, on any number of shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_config, on_mesh, relative_error

from megajax.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.model.product import product
from megajax.parallel.layout import Layout

SHARDS = [(1, False), (2, False), (4, False), (4, True)]


@pytest.mark.parametrize(('model', 'sequence_parallel'), SHARDS)
def test_a_column_and_a_row_parallel_layer_are_two_plain_ones_and_each_bias_is_added_once(model, sequence_parallel):
    config = make_config('gpt', 2, model, sequence_parallel=sequence_parallel)
    layout, random = Layout.of(config), np.random.default_rng(0)
    x, up, up_bias, down, down_bias = (random.normal(size=size) for size in ((4, 8, 16), (16, 32), (32,), (32, 16), (16,)))
    with on_mesh(config):
        make = functools.partial(dict, bias=True, std=1.0, layout=layout, key=jax.random.key(0))
        column = ColumnParallelLinear((16, 32), layout.mlp_up_DF, **make())
        row = RowParallelLinear((32, 16), layout.mlp_down_FD, **make())
        for layer, weight, bias in ((column, up, up_bias), (row, down, down_bias)):
            for parameter, value in ((layer.weight, weight), (layer.bias, bias)):
                parameter[...] = jax.device_put(value.astype('f4'), parameter.sharding)
        h_BSF = column(jax.device_put(x.astype('f4'), jax.P('data', None, None)))
        y_BSD = row(h_BSF)
        assert jax.typeof(h_BSF).sharding.spec == jax.P('data', None, 'model')
        assert jax.typeof(y_BSD).sharding.spec == jax.P('data', 'model' if sequence_parallel else None, None)
    assert relative_error(h_BSF, x @ up + up_bias) < 1e-6
    assert relative_error(y_BSD, (x @ up + up_bias) @ down + down_bias) < 1e-6


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ('x_spec', 'w_spec', 'out_spec'),
    [
        (jax.P('data', None, None), jax.P(None, 'model'), jax.P('data', None, 'model')),
        (jax.P('data', None, 'model'), jax.P('model', None), jax.P('data', None, None)),
        (jax.P('data', None, 'model'), jax.P('model', None), jax.P('data', 'model', None)),
    ],
    ids=['column', 'row', 'row-sp'],
)
def test_gradients_of_a_product_are_those_of_matmul(x_spec, w_spec, out_spec, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, ((4, 8, 16), (16, 32), (4, 8, 32)), strict=True))
    x, dy = x.astype(dtype), dy.astype(dtype)
    exact = functools.partial(jnp.matmul, precision='highest')
    y, gradients = jax.vjp(exact, x.astype('f4'), w.astype(dtype).astype('f4'))
    with on_mesh(make_config('gpt', 2, 4)):
        put = jax.device_put
        y_parallel, pullback = jax.vjp(lambda x, w: product(x, w, 1, out_spec, dtype), put(x, x_spec), put(w, w_spec))
        dx, dw = pullback(put(dy, out_spec))
        assert (y_parallel.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
        assert [jax.typeof(a).sharding.spec for a in (y_parallel, dx, dw)] == [out_spec, x_spec, w_spec]
    expected = y, *gradients(dy.astype('f4'))
    # The weight gradient is exact even for bf16 operands: products and sum are in fp32.
    limits = (1e-6, 1e-6, 1e-6) if dtype == jnp.float32 else (2**-8, 2**-8, 1e-6)
    for actual, reference, limit in zip((y_parallel, dx, dw), expected, limits, strict=True):
        assert relative_error(actual.astype('f4'), reference) < limit
