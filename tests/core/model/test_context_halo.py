"""Attention with a window on context shards equals attention of whole sequences."""

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import slow

from megajax.core.model import context_halo
from megajax.core.model.context_halo import attend_in_window
from megajax.core.model.kernels import KERNELS
from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.zigzag import position_at

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 48, 4, 2, 8


@pytest.fixture
def xla_as_cudnn(monkeypatch: pytest.MonkeyPatch):
    """Compute cuDNN's blocks, which are whole chunks, with XLA's kernel."""
    monkeypatch.setitem(KERNELS, 'cudnn', KERNELS['xla'])
    context_halo._passes.cache_clear()
    yield
    context_halo._passes.cache_clear()


def whole(window: int):
    def attend(q, k, v):
        size = (window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=size)

    return attend


# A chunk has LENGTH / 2 / shards tokens: 12, 6 or 3. XLA computes a window of 3 in 4, 2 or 1 block.
@pytest.mark.parametrize(
    ('shards', 'window', 'kernel'),
    [
        (2, 3, 'xla'),
        (4, 6, 'cudnn'),
        slow(2, 5, 'cudnn'),
        slow(2, 12, 'xla'),
        slow(4, 3, 'xla'),
        slow(4, 1, 'xla'),
        slow(8, 3, 'xla'),
        slow(8, 2, 'cudnn'),
    ],
)
def test_output_and_gradients_are_those_of_whole_sequences(
    shards: int, window: int, kernel: str, xla_as_cudnn: None
) -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal((ROWS, LENGTH, count, HEAD_DIM)).astype(np.float32)
        for count in (HEADS, GROUPS, GROUPS, HEADS)
    )
    o, pullback = jax.vjp(whole(window), q, k, v)
    expected = [o, *pullback(do)]
    order = position_at(np.arange(LENGTH), LENGTH, shards)
    axes = 'data', 'context'

    def to_shards(x: np.ndarray) -> jax.Array:
        parts = x[:, order].reshape(ROWS, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        spec = P(axes, None, None, 'model', None)
        return jax.device_put(parts, NamedSharding(jax.sharding.get_mesh(), spec))

    @jax.jit
    def output_and_gradients(q, k, v, do):
        mapped = jax.vmap(
            lambda *arrays: attend_in_window(*arrays, window, kernel, HEAD_DIM**-0.5),
            spmd_axis_name=axes,
        )
        o, pullback = jax.vjp(mapped, q, k, v)
        return o, *pullback(do)

    with jax.set_mesh(make_mesh(1, min(2, 8 // shards), context=shards)):
        actual = output_and_gradients(*map(to_shards, (q, k, v, do)))
    for x, y in zip(actual, expected, strict=True):
        in_order = np.asarray(x).swapaxes(0, 1).reshape(y.shape)[:, np.argsort(order)]
        np.testing.assert_allclose(in_order, y, atol=2e-6)
