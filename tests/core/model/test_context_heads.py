"""Attention by heads on context shards equals attention of whole sequences, also in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding
from support import with_gradients

from megajax.core.model.context_heads import Masks, attend_by_heads
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.zigzag import position_at

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 16, 8, 4, 8
SHARDS, MODEL, WINDOW, SCALE = 2, 2, 6, 0.5  # a window of more than a chunk
AXES = 'data', 'context'
DOCUMENTS = np.stack([np.arange(LENGTH) // 5, np.arange(LENGTH) // 9]).astype(np.int32)
LAYOUT = Layout(axes=(('N', ('model',)),), sizes=(('model', MODEL),))


def whole(q, k, v, sinks):
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
    allowed = (behind >= 0) & (behind < WINDOW)
    allowed = allowed[None] & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])
    score = SCALE * jnp.einsum('rsnh,rynh->rnsy', q, k)
    score = jnp.where(allowed[:, None], score, -jnp.inf)
    column = jnp.broadcast_to(sinks[None, :, None, None], (*score.shape[:3], 1))
    weight = jax.nn.softmax(jnp.concatenate([score, column], axis=-1))
    return jnp.einsum('rnsy,rynh->rsnh', weight[..., :-1], v)


def test_output_and_gradients_are_those_of_whole_sequences() -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal((ROWS, LENGTH, heads, HEAD_DIM)).astype(np.float32)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    sinks = np.linspace(-2, 2, HEADS, dtype=np.float32)
    *expected, expected_sinks = with_gradients(whole)(do, q, k, v, sinks)
    order = position_at(np.arange(LENGTH), LENGTH, SHARDS)

    def to_shards(x: np.ndarray) -> jax.Array:
        parts = x[:, order].reshape(ROWS, SHARDS, -1, *x.shape[2:]).swapaxes(0, 1)
        spec = P(AXES, None, None, 'model', None)
        return jax.device_put(parts, NamedSharding(jax.sharding.get_mesh(), spec))

    @jax.jit
    def output_and_gradients(do, document, *arrays):
        def of_shard(do, document, *arrays):
            def attend(q, k, v, sinks):
                masks = Masks(True, WINDOW)
                return attend_by_heads(q, k, v, masks, LAYOUT, 'xla', SCALE, document, sinks)

            o, pullback = jax.vjp(attend, *arrays)
            return o, *pullback(do)

        mapped = jax.vmap(of_shard, (0, None, 0, 0, 0, None), spmd_axis_name=AXES)
        return mapped(do, document, *arrays)

    with jax.set_mesh(make_mesh(1, MODEL, context=SHARDS)):
        *actual, of_sinks = output_and_gradients(
            to_shards(do), DOCUMENTS, *map(to_shards, (q, k, v)), jax.device_put(sinks, P('model'))
        )
    # Each shard has the gradients of its own heads, and zeros.
    assert np.count_nonzero(of_sinks) == HEADS
    np.testing.assert_allclose(of_sinks.sum(0), expected_sinks, atol=2e-5)
    for x, y in zip(actual, expected, strict=True):
        in_order = np.asarray(x).swapaxes(0, 1).reshape(y.shape)[:, np.argsort(order)]
        np.testing.assert_allclose(in_order, y, atol=2e-6)
