"""Attention with a window on context shards equals attention of whole sequences."""

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import exhaustive, slow

from megajax.core.model import context_halo
from megajax.core.model.kernels import KERNELS
from megajax.core.model.passes import attend_by
from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.zigzag import position_at

ROWS, LENGTH, HEADS, GROUPS, HEAD_DIM = 2, 48, 4, 2, 8


@pytest.fixture
def xla_as_cudnn(monkeypatch: pytest.MonkeyPatch):
    """Compute cuDNN's blocks, which are whole chunks, with XLA's kernel."""
    monkeypatch.setitem(KERNELS, 'cudnn', KERNELS['xla'])
    context_halo.passes.cache_clear()
    yield
    context_halo.passes.cache_clear()


def first_tokens() -> np.ndarray:
    """The first token of each token's document: some have one token, some several shards."""
    place = np.arange(LENGTH)
    cuts = [5, 13, 24], [1, 2, 3, 11, 12, 13, 36, 47]
    starts = [np.where(np.isin(place, row), place, 0) for row in cuts]
    return np.maximum.accumulate(np.array(starts, np.int32), axis=1)


def whole(window: int, document: np.ndarray | None):
    mask = None if document is None else document[:, None, :, None] == document[:, None, None]

    def attend(q, k, v):
        said = {'is_causal': True, 'local_window_size': (window - 1, 0), 'mask': mask}
        return jax.nn.dot_product_attention(q, k, v, **said)

    return attend


# A chunk has LENGTH / 2 / shards tokens: 12, 6 or 3. XLA computes a window of 3 in 4, 2 or 1 block.
@pytest.mark.parametrize(
    ('shards', 'window', 'kernel', 'has_documents'),
    [
        (2, 3, 'xla', True),
        (4, 6, 'cudnn', False),
        slow(2, 3, 'xla', False),
        slow(2, 5, 'cudnn', True),
        exhaustive(2, 5, 'cudnn', False),
        slow(2, 12, 'xla', False),
        exhaustive(2, 12, 'xla', True),
        slow(4, 3, 'xla', False),
        slow(4, 1, 'xla', False),
        slow(4, 6, 'cudnn', True),
        exhaustive(8, 3, 'xla', False),
        slow(8, 3, 'xla', True),
        slow(8, 2, 'cudnn', False),
    ],
)
def test_output_and_gradients_are_those_of_whole_sequences(
    shards: int, window: int, kernel: str, has_documents: bool, xla_as_cudnn: None
) -> None:
    random = np.random.default_rng(0)
    q, k, v, do = (
        random.standard_normal((ROWS, LENGTH, count, HEAD_DIM)).astype(np.float32)
        for count in (HEADS, GROUPS, GROUPS, HEADS)
    )
    first = first_tokens() if has_documents else None

    @jax.jit
    def of_whole_sequences(q, k, v, do):
        o, pullback = jax.vjp(whole(window, first), q, k, v)
        return o, *pullback(do)

    expected = of_whole_sequences(q, k, v, do)
    order = position_at(np.arange(LENGTH), LENGTH, shards)
    axes = 'data', 'context'

    def to_shards(x: np.ndarray) -> jax.Array:
        parts = x[:, order].reshape(ROWS, shards, -1, *x.shape[2:]).swapaxes(0, 1)
        spec = P(axes, None, None, 'model', None) if x.ndim == 4 else P(axes)
        return jax.device_put(parts, NamedSharding(jax.sharding.get_mesh(), spec))

    @jax.jit
    def output_and_gradients(q, k, v, do, *first):
        def attend(q, k, v, *first):
            passes = context_halo.passes(window, kernel, HEAD_DIM**-0.5, 0.0)
            return attend_by(passes, q, k, v, *first)

        mapped = jax.vmap(attend, spmd_axis_name=axes)
        o, pullback = jax.vjp(lambda *x: mapped(*x, *first), q, k, v)
        return o, *pullback(do)

    with jax.set_mesh(make_mesh(1, min(2, 8 // shards), context=shards)):
        documents = [] if first is None else [first]
        actual = output_and_gradients(*map(to_shards, (q, k, v, do, *documents)))
    for x, y in zip(actual, expected, strict=True):
        in_order = np.asarray(x).swapaxes(0, 1).reshape(y.shape)[:, np.argsort(order)]
        np.testing.assert_allclose(in_order, y, atol=2e-6)
