"""Attention sinks, against a softmax in fp64 with one more column."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from support import exhaustive, make_config, on_mesh, with_gradients

from megajax.core.model import flash
from megajax.core.model.attention import attend
from megajax.core.model.kernels import KERNELS
from megajax.core.model.passes import attend_by
from megajax.core.parallel.layout import Layout

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM, SCALE = 2, 24, 4, 2, 8, 0.4


def with_a_column(q, k, v, sinks, window, documents):
    """Attention with a column of the sinks in the softmax, which has no value."""
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    score = SCALE * jnp.einsum('rsnh,rynh->rnsy', q, k)
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = (behind >= 0) & (behind < (window or LENGTH))
    if documents is not None:
        visible &= documents[:, None] == documents
    score = jnp.where(visible, score, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*score.shape[:3], 1))
    weight = jax.nn.softmax(jnp.concatenate([score, column], axis=-1), axis=-1)
    return jnp.einsum('rnsy,rynh->rsnh', weight[..., :-1], v)


@pytest.mark.parametrize(
    ('way', 'window', 'has_documents'),
    [
        ('flash', None, True),
        ('flash', 5, True),
        exhaustive('flash', 20, False),
        ('xla', None, False),
        exhaustive('xla', 5, True),
        ('xla', 20, True),
        exhaustive('recomputed', None, True),
        ('recomputed', 5, False),
        exhaustive('recomputed', 20, True),
    ],
)
def test_a_sink_is_one_more_column_of_the_softmax_and_so_are_its_gradients(
    way, window, has_documents, monkeypatch
) -> None:
    monkeypatch.setitem(KERNELS, 'cudnn', KERNELS['xla'])
    random = np.random.default_rng(0)
    q, k, v, do = (
        2 * random.standard_normal((ROWS, LENGTH, heads, HEAD_DIM))
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    sinks = np.array([-30.0, 0.0, 1.0, 30.0])  # from no effect to almost all of the weight
    documents = np.repeat(np.arange(3), [10, 8, 6]) if has_documents else None
    with jax.enable_x64(True):
        reference = functools.partial(with_a_column, window=window, documents=documents)
        expected = with_gradients(reference)(do, q, k, v, sinks)
    config = make_config('llama', 2, 2)
    with on_mesh(config):
        layout = Layout.of(config)
        spec = P('data', None, 'model', None)
        placed = [jax.device_put(x.astype(np.float32), spec) for x in (do, q, k, v)]
        sinks_N = jax.device_put(sinks.astype(np.float32), layout('N'))
        segment_RS = None
        if documents is not None:
            segment_RS = jax.device_put(np.tile(documents, (ROWS, 1)), layout('RS'))

        def ours(q, k, v, sinks_N):
            if way == 'flash':
                passes = flash.passes(True, window, SCALE)
                return attend_by(passes, q, k, v, segment_RS, sinks_N)
            settings = {'scale': SCALE, 'window': window, 'recompute': way == 'recomputed'}
            return attend(q, k, v, layout, segment_RS=segment_RS, sinks_N=sinks_N, **settings)

        actual = with_gradients(ours)(*placed, sinks_N)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))
