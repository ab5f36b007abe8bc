"""A column-parallel layer and a row-parallel one after it are two plain layers, on any number of
shards.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.stages import Wrapped
from support import exhaustive, make_config, on_mesh, relative_error, slow

from megajax.core.counts.declaration import Parameter, Role
from megajax.core.model.linear import ColumnParallelLinear, RowParallelLinear
from megajax.core.model.parameters import Parameters
from megajax.core.model.product import product
from megajax.core.parallel.layout import Layout

SHARDS = [exhaustive(1, False), exhaustive(2, False), slow(4, False), (4, True)]
SIZES = {'D': 16, 'F': 32}


def linear(dims: str, layout: Layout) -> Parameters:
    weight = Parameter(dims, Role.MATRIX, std=1.0)
    bias = Parameter(dims[-1], Role.VECTOR)
    return Parameters({'weight': weight, 'bias': bias}, SIZES, layout)


@pytest.mark.parametrize(('model', 'sequence_parallel'), SHARDS)
def test_a_column_and_a_row_parallel_layer_are_two_plain_ones_and_each_bias_is_added_once(
    model, sequence_parallel
):
    config = make_config('gpt', 2, model, sequence_parallel=sequence_parallel)
    layout, random = Layout.of(config), np.random.default_rng(0)
    x, up, up_bias, down, down_bias = (
        random.normal(size=size) for size in ((4, 8, 16), (16, 32), (32,), (32, 16), (16,))
    )
    with on_mesh(config):
        column, row = (
            kind(linear(dims, layout), key=jax.random.key(0))
            for kind, dims in ((ColumnParallelLinear, 'DF'), (RowParallelLinear, 'FD'))
        )
        for layer, weight, bias in ((column, up, up_bias), (row, down, down_bias)):
            for parameter, value in ((layer.weight, weight), (layer.bias, bias)):
                parameter[...] = jax.device_put(value.astype('f4'), parameter.sharding)
        x_BSD = jax.device_put(x.astype('f4'), jax.P('data', None, None))
        h_BSF = column.with_bias(column.product(x_BSD))
        y_BSD = row.with_bias(row.reduced(h_BSF))
        assert jax.typeof(h_BSF).sharding.spec == jax.P('data', None, 'model')
        assert jax.typeof(y_BSD).sharding.spec == jax.P(
            'data', 'model' if sequence_parallel else None, None
        )
    assert relative_error(h_BSF, x @ up + up_bias) < 1e-6
    assert relative_error(y_BSD, (x @ up + up_bias) @ down + down_bias) < 1e-6


def with_gradients(function: Callable[..., jax.Array]) -> Wrapped:
    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(function, x, w)
        return y, *pullback(dy)

    return jax.jit(both)


@pytest.mark.parametrize('dtype', [slow(jnp.float32), jnp.bfloat16])
@pytest.mark.parametrize(
    ('equation', 'sequence_parallel', 'x_axes', 'w_axes', 'out_axes'),
    [
        ('BSD,DF->BSF', False, ('data', None, None), (None, 'model'), ('data', None, 'model')),
        ('BSF,FD->BTD', False, ('data', None, 'model'), ('model', None), ('data', None, None)),
        ('BSF,FD->BTD', True, ('data', None, 'model'), ('model', None), ('data', 'model', None)),
    ],
    ids=['column', 'row', 'row-sp'],
)
def test_gradients_of_a_product_are_those_of_matmul(
    equation, sequence_parallel, x_axes, w_axes, out_axes, dtype
):
    x_spec, w_spec, out_spec = (jax.P(*axes) for axes in (x_axes, w_axes, out_axes))
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dy = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys, ((4, 8, 16), (16, 32), (4, 8, 32)), strict=True)
    )
    x, dy = x.astype(dtype), dy.astype(dtype)
    exact = functools.partial(jnp.matmul, precision='highest')
    expected = with_gradients(exact)(*(a.astype('f4') for a in (x, w.astype(dtype), dy)))
    config = make_config('gpt', 2, 4, sequence_parallel=sequence_parallel)
    layout = Layout.of(config)
    with on_mesh(config):
        put = jax.device_put
        multiply = functools.partial(product, equation, layout=layout, dtype=dtype)
        placed = put(x, x_spec), put(w, w_spec), put(dy, out_spec)
        y_parallel, dx, dw = with_gradients(multiply)(*placed)
        assert (y_parallel.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
        assert [jax.typeof(a).sharding.spec for a in (y_parallel, dx, dw)] == [
            out_spec,
            x_spec,
            w_spec,
        ]
    # The weight gradient is exact even for bf16 operands: products and sum are in fp32.
    limits = (1e-6, 1e-6, 1e-6) if dtype == jnp.float32 else (2**-8, 2**-8, 1e-6)
    for actual, reference, limit in zip((y_parallel, dx, dw), expected, limits, strict=True):
        assert relative_error(actual.astype('f4'), reference) < limit
