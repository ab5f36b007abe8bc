"""Attention, against jax's own, and with fewer key/value heads than shards."""

import functools

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
    with_gradients,
)

from megajax.core.counts.windows import keys_read
from megajax.core.model.attention import Attention, attend, attention_core
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout

DOCUMENTS = [10, 8, 6]  # lengths in a row


def drawn(*heads: int) -> list[np.ndarray]:
    """Queries, what they get a gradient of, keys and values, of random numbers."""
    random = np.random.default_rng(0)
    scales = 3, 3, 1, 1
    return [
        scale * random.normal(size=(2, 24, count, 16)).astype(np.float32)
        for scale, count in zip(scales, heads, strict=True)
    ]


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
    q_BSNH, do_BSNH, k_BSKH, v_BSKH = drawn(8, 8, kv_heads, kv_heads)

    plain = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation='xla')
    expected = with_gradients(plain)(do_BSNH, q_BSNH, k_BSKH, v_BSKH)
    config = make_config('gpt', 2, min(kv_heads, 4))
    with on_mesh(config):
        placed = [
            jax.device_put(x, jax.P('data', None, 'model', None))
            for x in (do_BSNH, q_BSNH, k_BSKH, v_BSKH)
        ]
        layout = Layout.of(config)
        ours = functools.partial(
            attend, layout=layout, scale=0.25, recompute=recompute, causal=causal
        )
        actual = with_gradients(ours)(*placed)
    for x, reference in zip(actual, expected, strict=True):
        assert relative_error(x, reference) < 1e-5


@pytest.mark.parametrize(
    ('window', 'documents'),
    [
        (1, DOCUMENTS),
        exhaustive(3, None),
        (4, DOCUMENTS),
        (12, None),
        exhaustive(24, DOCUMENTS),
        (50, None),
    ],
)
def test_a_window_is_a_token_and_those_before_it_and_so_are_its_gradients(window, documents):
    q_BSNH, do_BSNH, k_BSKH, v_BSKH = drawn(8, 8, 4, 4)
    behind = np.arange(24)[:, None] - np.arange(24)
    mask, segment_BS = (behind >= 0) & (behind < window), None
    if documents:
        number = np.repeat(np.arange(3), documents)
        mask &= number[:, None] == number
        segment_BS = jnp.tile(number, (2, 1))

    plain = functools.partial(jax.nn.dot_product_attention, mask=mask[None, None], scale=0.3)
    expected = with_gradients(plain)(do_BSNH, q_BSNH, k_BSKH, v_BSKH)
    config = make_config('gpt', 2, 2)
    with on_mesh(config):
        placed = [
            jax.device_put(x, jax.P('data', None, 'model', None))
            for x in (do_BSNH, q_BSNH, k_BSKH, v_BSKH)
        ]
        segment_RS = None if segment_BS is None else jax.device_put(segment_BS, jax.P('data'))
        ours = functools.partial(
            attend, layout=Layout.of(config), scale=0.3, segment_RS=segment_RS, window=window
        )
        actual = with_gradients(ours)(*placed)
    for x, reference in zip(actual, expected, strict=True):
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
            jax.device_put(x, layout('BSD'))
            for x in np.random.default_rng(1).normal(size=(2, 2, 32, 64)).astype(np.float32)
        )
        bias = params['qkv']['bias']
        numbers = np.arange(bias[...].size, dtype=np.float32).reshape(bias.shape) / 1000
        bias.set_value(jax.device_put(numbers, bias.get_value().sharding))

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
