"""Attention on context shards is attention of whole sequences, and so are its gradients."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import exhaustive, slow

from megajax.core.model.context import passes
from megajax.core.model.kernels import KERNELS
from megajax.core.model.passes import attend_by
from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.zigzag import position_at

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 32, 4, 2, 8
SCALE, RATE = 0.5, 0.1


def arrays(*heads: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [
        random.standard_normal((ROWS, LENGTH, count, HEAD_DIM)).astype(np.float32)
        for count in heads
    ]


# The first token of each document, in each row: documents of one token, and of several shards.
CUTS = [3, 17, 18], [1, 2, 3, 4, 5, 29]


def first_tokens() -> np.ndarray:
    """The position of the first token of each token's document, [ROWS, LENGTH]."""
    place = np.arange(LENGTH)
    starts = [np.where(np.isin(place, cuts), place, 0) for cuts in CUTS]
    return np.maximum.accumulate(np.array(starts, np.int32), axis=1)


def kept() -> jax.Array:
    """The weights that dropout keeps in whole sequences, [ROWS, HEADS, LENGTH, LENGTH]."""
    shape = HEADS, LENGTH, LENGTH
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - RATE, shape))
    return draw(jax.random.split(jax.random.key(0), ROWS))


def whole(q, k, v, sinks=None, document=None, kept=None):
    if sinks is None:
        mask = None if document is None else document[:, None, :, None] == document[:, None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, scale=SCALE)
    k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
    score = SCALE * jnp.einsum('rsnh,rynh->rnsy', q, k)
    score = jnp.where(np.tri(LENGTH, dtype=bool), score, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*score.shape[:3], 1))
    weight = jax.nn.softmax(jnp.concatenate([score, column], axis=-1))[..., :-1]
    if kept is not None:
        weight = jnp.where(kept, weight, 0) / (1 - RATE)
    return jnp.einsum('rnsy,rynh->rsnh', weight, v)


@pytest.mark.parametrize(
    ('shards', 'exchange', 'more'),
    [
        (4, 'ring', 'sinks and dropout'),
        (2, 'gather', ''),
        (4, 'gather', 'documents'),
        slow(8, 'ring', 'documents'),
        slow(4, 'ring', ''),
        slow(2, 'gather', 'sinks'),
        *(exhaustive(4, 'gather', more) for more in ('', 'sinks')),
        *(exhaustive(2, 'ring', more) for more in ('', 'sinks', 'documents')),
    ],
)
def test_output_and_gradients_are_those_of_whole_sequences(
    shards: int, exchange: str, more: str
) -> None:
    q, k, v, do = arrays(HEADS, GROUPS, GROUPS, HEADS)
    sinks = (np.linspace(-2, 2, HEADS, dtype=np.float32),) if 'sinks' in more else ()
    first = first_tokens() if more == 'documents' else None
    rate, keys = 0.0, None
    if 'dropout' in more:
        rate, keys = RATE, jax.random.key_data(jax.random.split(jax.random.key(0), ROWS))

    @jax.jit
    def of_whole_sequences(do, *arrays):
        attend = partial(whole, document=first, kept=kept() if rate else None)
        o, pullback = jax.vjp(attend, *arrays)
        return [o, *pullback(do)]

    expected = of_whole_sequences(do, q, k, v, *sinks)
    order = position_at(np.arange(LENGTH), LENGTH, shards)
    axes = 'data', 'context'

    def to_shards(x: np.ndarray) -> jax.Array:
        parts = x[:, order].reshape(ROWS, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        spec = P(axes, None, None, 'model', None) if x.ndim == 4 else P(axes)
        return jax.device_put(parts, NamedSharding(jax.sharding.get_mesh(), spec))

    @jax.jit
    def output_and_gradients(first, do, *arrays):
        def of_shard(first, do, *arrays):
            def attend(q, k, v, sinks=None):
                return attend_by(passes(exchange, 'xla', SCALE, rate), q, k, v, first, sinks, keys)

            o, pullback = jax.vjp(attend, *arrays)
            return o, *pullback(do)

        given = (None if first is None else 0, 0, 0, 0, 0, *(None for _ in sinks))
        return jax.vmap(of_shard, given, spmd_axis_name=axes)(first, do, *arrays)

    with jax.set_mesh(make_mesh(1, min(2, 8 // shards), context=shards)):
        placed = (jax.device_put(x, P('model')) for x in sinks)
        documents = None if first is None else to_shards(first)
        actual = output_and_gradients(documents, *map(to_shards, (do, q, k, v)), *placed)
    if sinks:  # each shard has its part of the sum
        *actual, of_sinks = actual
        np.testing.assert_allclose(of_sinks.sum(0), expected.pop(), atol=2e-5)
    for x, y in zip(actual, expected, strict=True):
        in_order = np.asarray(x).swapaxes(0, 1).reshape(y.shape)[:, np.argsort(order)]
        np.testing.assert_allclose(in_order, y, atol=2e-6)


def test_blocks_of_keys_are_merged_by_their_log_sum_exp() -> None:
    q, k, v, do = arrays(HEADS, GROUPS, GROUPS, HEADS)
    kernel = KERNELS['xla'].scaled(SCALE)
    halves = slice(None, LENGTH // 2), slice(LENGTH // 2, None)

    @jax.jit
    def by_halves(q, k, v, do):
        of_halves = [kernel.forward(q, k[:, half], v[:, half], False) for half in halves]
        lse = jnp.logaddexp(*(part for _, part in of_halves))
        o = sum(jnp.moveaxis(jnp.exp(part - lse), 1, 2)[..., None] * x for x, part in of_halves)
        dq, dk, dv = zip(
            *(kernel.backward(q, k[:, half], v[:, half], o, lse, do, False) for half in halves),
            strict=True,
        )
        return o, sum(dq), *(jnp.concatenate(parts, 1) for parts in (dk, dv))

    @jax.jit
    def at_once(q, k, v, do):
        attend = partial(jax.nn.dot_product_attention, scale=SCALE)
        o, pullback = jax.vjp(attend, q, k, v)
        return o, *pullback(do)

    (o, *gradients), (expected, *of_whole) = (f(q, k, v, do) for f in (by_halves, at_once))
    np.testing.assert_allclose(o, expected, atol=1e-6)
    for found, expected in zip(gradients, of_whole, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_the_private_functions_of_cudnn_still_take_what_the_kernel_gives_them() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    backward = list(inspect.signature(cudnn._dot_product_attention_bwd_impl).parameters)
    given = 'query', 'key', 'value', *backward[3:10], 'activation', 'fwd_output', 'grad_output'
    assert tuple(backward[:13]) == given
    settings = 'scale', 'seed', 'dropout_rate', 'variadic_args', 'mask_type', 'layout'
    known = {*settings, 'sliding_window_length', 'score_mod_args', 'score_mod'}
    assert {*settings, 'sliding_window_length'} <= {*backward[13:]} <= known
    forward = list(inspect.signature(cudnn._dot_product_attention_fwd_impl).parameters)
    assert forward[:10] == backward[:10]
    assert {*backward[13:], 'is_training'} == {*forward[10:]}
