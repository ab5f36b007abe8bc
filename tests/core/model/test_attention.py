"""Attention, against jax's own, and with fewer key/value heads than shards."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    assert_close,
    exhaustive,
    gather,
    make_config,
    on_mesh,
    relative_error,
    slow,
)

from megajax.core.counts.windows import keys_read
from megajax.core.model.attention import Attention, attend, attention_core
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout

DOCUMENTS = [10, 8, 6]  # lengths in a row


def value_and_pullback(
    function: Callable[..., jax.Array],
) -> Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]]:
    def both(*arguments: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value, pullback = jax.vjp(function, *arguments[:-1])
        return value, pullback(arguments[-1])

    return both


@pytest.mark.parametrize(
    ('kv_heads', 'recompute', 'causal'),
    [
        (8, True, True),
        (4, False, False),
        (1, False, True),
        exhaustive(8, False, False),
        exhaustive(8, False, True),
        exhaustive(4, False, True),
        exhaustive(4, True, True),
        exhaustive(1, False, False),
        exhaustive(1, True, True),
    ],
)
def test_attend_is_dot_product_attention_and_so_are_its_gradients(kv_heads, recompute, causal):
    keys = jax.random.split(jax.random.key(0), 4)
    q_BSNH, do_BSNH = (3 * jax.random.normal(key, (2, 24, 8, 16)) for key in keys[:2])
    k_BSKH, v_BSKH = (jax.random.normal(key, (2, 24, kv_heads, 16)) for key in keys[2:])

    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation='xla')
    expected, expected_gradients = jax.jit(value_and_pullback(plain))(
        q_BSNH, k_BSKH, v_BSKH, do_BSNH
    )
    config = make_config('gpt', 2, min(kv_heads, 4))
    with on_mesh(config):
        placed = [
            jax.device_put(x, jax.P('data', None, 'model', None))
            for x in (q_BSNH, k_BSKH, v_BSKH, do_BSNH)
        ]
        layout = Layout.of(config)
        ours = functools.partial(
            attend, layout=layout, scale=0.25, recompute=recompute, causal=causal
        )
        actual, gradients = jax.jit(value_and_pullback(ours))(*placed)
    for x, reference in zip((actual, *gradients), (expected, *expected_gradients), strict=True):
        assert relative_error(x, reference) < 1e-5


@pytest.mark.parametrize(
    ('window', 'documents'),
    [(1, DOCUMENTS), (3, None), (4, DOCUMENTS), (12, None), (24, DOCUMENTS), (50, None)],
)
def test_a_window_is_a_token_and_those_before_it_and_so_are_its_gradients(window, documents):
    keys = jax.random.split(jax.random.key(0), 4)
    q_BSNH, do_BSNH = (3 * jax.random.normal(key, (2, 24, 8, 16)) for key in keys[:2])
    k_BSKH, v_BSKH = (jax.random.normal(key, (2, 24, 4, 16)) for key in keys[2:])
    behind = np.arange(24)[:, None] - np.arange(24)
    mask, segment_BS = (behind >= 0) & (behind < window), None
    if documents:
        number = np.repeat(np.arange(3), documents)
        mask &= number[:, None] == number
        segment_BS = jnp.tile(number, (2, 1))

    plain = functools.partial(jax.nn.dot_product_attention, mask=mask[None, None], scale=0.3)
    expected, expected_gradients = jax.jit(value_and_pullback(plain))(
        q_BSNH, k_BSKH, v_BSKH, do_BSNH
    )
    config = make_config('gpt', 2, 2)
    with on_mesh(config):
        placed = [
            jax.device_put(x, jax.P('data', None, 'model', None))
            for x in (q_BSNH, k_BSKH, v_BSKH, do_BSNH)
        ]
        segment_RS = None if segment_BS is None else jax.device_put(segment_BS, jax.P('data'))
        ours = functools.partial(
            attend, layout=Layout.of(config), scale=0.3, segment_RS=segment_RS, window=window
        )
        actual, gradients = jax.jit(value_and_pullback(ours))(*placed)
    for x, reference in zip((actual, *gradients), (expected, *expected_gradients), strict=True):
        assert relative_error(x, reference) < 1e-5


@pytest.mark.parametrize('rate', [0.0, 0.1])
def test_the_scores_of_a_window_are_as_large_as_counted_and_linear_without_dropout(rate) -> None:
    def largest(length: int) -> int:
        def window(q_BSNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
            keys, layout = jax.random.split(jax.random.key(0), 1), Layout.of(config)
            return attend(
                q_BSNH, k_BSKH, k_BSKH, layout, scale=1.0, window=16, rate=rate, key_R=keys
            )

        x = jax.device_put(jnp.zeros((1, length, 2, 8)), Layout.of(config)('BSNH'))
        program = jax.make_jaxpr(window)(x, x)
        return max(out.aval.size for each in program.eqns for out in each.outvars)

    config = make_config()
    with on_mesh(config):
        for length in (256, 1024):
            counted = keys_read(16, length, flash=False, dropout=rate)
            assert largest(length) == 2 * length * counted
            assert counted == (length if rate else 2 * 16)


@functools.cache
def attention(kv_heads: int, shards: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The output of an attention layer and the gradients of its parameters."""
    model = {'num_kv_heads': kv_heads, 'bias': True, 'init_std': 0.6}
    config = make_config('llama', 1, shards, model=model)
    with on_mesh(config):
        layout = Layout.of(config)
        parameters = Parameters.of(config.model, layout)['layers']['attention']
        layer = Attention(config.model, parameters, key=jax.random.key(0))
        graph, params = nnx.split(layer)
        x_BSD, weight_BSD = (
            jax.device_put(jax.random.normal(jax.random.key(seed), (2, 32, 64)), layout('BSD'))
            for seed in (1, 2)
        )
        bias = (
            jnp.arange(params['qkv']['bias'][...].size, dtype=jnp.float32).reshape(
                params['qkv']['bias'].shape
            )
            / 1000
        )
        params['qkv']['bias'][...] = jax.device_put(bias, params['qkv']['bias'].sharding)

        def output(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            core = attention_core(config.model, layout)
            y_BSD, _ = nnx.merge(graph, params).update(x_BSD, core)
            return (y_BSD * jax.reshard(weight_BSD, jax.typeof(y_BSD).sharding.spec)).sum(), y_BSD

        gradients, y_BSD = jax.jit(jax.grad(output, has_aux=True))(params)
        return np.asarray(y_BSD), gather(gradients)


@pytest.mark.parametrize(
    ('kv_heads', 'shards'),
    [slow(4, 2), exhaustive(4, 4), slow(4, 8), (2, 8), slow(1, 2), exhaustive(1, 8)],
)
def test_attention_is_the_same_on_more_and_on_fewer_shards_than_key_value_heads(kv_heads, shards):
    (expected, expected_gradients), (actual, gradients) = (
        attention(kv_heads, 1),
        attention(kv_heads, shards),
    )
    assert relative_error(actual, expected) < 1e-5
    assert_close(gradients, expected_gradients, 1e-5)
