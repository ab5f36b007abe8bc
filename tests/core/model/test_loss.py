"""The loss on logits that are split over the vocabulary, against float64 on whole ones."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import exhaustive, make_config, on_mesh, relative_error

from megajax.core.counts.chunks import CPU_CHUNK_BYTES
from megajax.core.model import loss as loss_module
from megajax.core.model.loss import Loss
from megajax.core.parallel.layout import Layout

ROWS, LENGTH, HIDDEN, VOCAB, PADDED = 8, 16, 24, 1000, 1024
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, LENGTH, HIDDEN)).astype('f4')
HEAD = random.normal(size=(PADDED, HIDDEN)).astype('f4')
LABEL = random.integers(VOCAB, size=(ROWS, LENGTH), dtype=np.int32)
WEIGHT = ((random.random((ROWS, LENGTH)) < 0.7) * random.random((ROWS, LENGTH))).astype('f4')

PLACES = (1, 1, False), (2, 4, False), (2, 4, True)
every_place = pytest.mark.parametrize('place', PLACES, ids=['1x1', '2x4', '2x4-sp'])
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)]


def config_of(place, smoothing, z_loss):
    return make_config(
        'gpt',
        *place[:2],
        sequence_parallel=place[2],
        loss={'label_smoothing': smoothing, 'z_loss': z_loss},
    )


@functools.cache
def compiled(place, smoothing, z_loss):
    """(objective, nll), and the gradients of the objective by x and head, of each data shard."""
    config = config_of(place, smoothing, z_loss)
    per_shard = jax.vmap(
        jax.value_and_grad(
            Loss.of(config, Layout.of(config).per_shard), argnums=(0, 1), has_aux=True
        ),
        in_axes=(0, None, 0, 0),
        spmd_axis_name='data',
    )
    return jax.jit(per_shard)


def sums_and_gradients(place, smoothing=0.0, z_loss=0.0, scale=1.0, function=compiled):
    """The sums and gradients of all data shards, each by itself as in the train step."""
    config = config_of(place, smoothing, z_loss)
    layout = Layout.of(config).per_shard

    def by_shard(x: np.ndarray, *spec: str | None) -> jax.Array:
        return jax.device_put(x.reshape(place[0], -1, *x.shape[1:]), jax.P('data', None, *spec))

    with on_mesh(config):
        head_Vd = jax.device_put(HEAD, layout('VD'))
        (objective, nll), (dx, dhead) = function(place, smoothing, z_loss)(
            by_shard(scale * X, *layout('TD')),
            head_Vd,
            by_shard(LABEL, None),
            by_shard(WEIGHT, None),
        )
        sums = np.asarray(objective, np.float64).sum(), np.asarray(nll, np.float64).sum()
        return sums, (np.asarray(dx).reshape(X.shape), np.asarray(dhead).sum(0))


@functools.cache
def in_float64(smoothing, z_loss):
    """The same by optax on whole logits."""

    def objective(x, head):
        logits = x @ head[:VOCAB].T
        target = optax.smooth_labels(jax.nn.one_hot(LABEL, VOCAB, dtype=jnp.float64), smoothing)
        total = jax.nn.logsumexp(logits, -1)
        per_token = optax.softmax_cross_entropy(logits, target) + z_loss * total**2
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, LABEL)
        return (per_token * WEIGHT).sum(), (nll * WEIGHT).sum()

    with jax.enable_x64(True):
        both = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))
        (value, nll), gradients = both(np.float64(X), np.float64(HEAD))
        return (float(value), float(nll)), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize(
    ('place', 'smoothing', 'z_loss'),
    [
        (place, *terms) if place == PLACES[-1] or all(terms) else exhaustive(place, *terms)
        for place in PLACES
        for terms in TERMS
    ],
)
def test_loss_and_gradients_are_those_of_optax_in_float64(place, smoothing, z_loss):
    (expected, expected_gradients), (actual, gradients) = (
        in_float64(smoothing, z_loss),
        sums_and_gradients(place, smoothing, z_loss),
    )
    for x, reference in zip((*actual, *gradients), (*expected, *expected_gradients), strict=True):
        assert relative_error(x, reference) < 2e-6


@every_place
def test_chunks_change_nothing(place, monkeypatch):
    whole = sums_and_gradients(place, *TERMS[-1])
    chunks = []
    split = loss_module._chunks
    monkeypatch.setattr('megajax.core.counts.chunks.CPU_CHUNK_BYTES', 1)
    monkeypatch.setattr(loss_module, '_chunks', lambda *a: chunks.append(split(*a)) or chunks[-1])
    chunked = sums_and_gradients(place, *TERMS[-1], function=inspect.unwrap(compiled))
    assert len(chunks[0][0]) == (
        LENGTH // 4 if place[2] else LENGTH
    )  # a token of each sequence shard at a time
    for x, reference in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        assert relative_error(x, reference) < 2e-6


@pytest.mark.parametrize('sequence_parallel', [False, True])
@pytest.mark.parametrize('shards', [1, 2, 8])
@pytest.mark.parametrize(
    ('rows', 'length', 'vocab'),
    [(1, 8192, 32768), (4, 1024, 50304), (16, 2048, 128256), (3, 1536, 1024), (64, 96, 262144)],
)
def test_the_fewest_chunks_are_made_whose_logits_fit(
    rows, length, vocab, shards, sequence_parallel
):
    config = make_config('gpt', 1, shards, sequence_parallel=sequence_parallel and shards > 1)
    layout = Layout.of(config)

    def lengths() -> tuple[jax.Array, ...]:
        x_BSD = jnp.zeros((rows, length, 8), out_sharding=layout('BTD'))
        token_BS = jnp.zeros((rows, length))
        return loss_module._chunks(x_BSD, (jnp.zeros((8, vocab)), None), token_BS, token_BS, layout)

    with on_mesh(config):
        chunks = jax.eval_shape(lengths)[1]
    count, tokens = len(chunks), length // layout.num_shards('T')
    logit_bytes = 4 * rows * length * vocab // shards
    assert 4 * math.prod(chunks.shape[1:]) * vocab // shards == logit_bytes // count
    assert logit_bytes <= count * CPU_CHUNK_BYTES
    assert not any(
        logit_bytes <= fewer * CPU_CHUNK_BYTES for fewer in range(1, count) if tokens % fewer == 0
    )


@every_place
def test_extreme_logits_stay_finite(place):
    sums, gradients = sums_and_gradients(place, *TERMS[-1], scale=1e4)
    assert np.abs(1e4 * X @ HEAD.T).max() > 1e5
    assert all(np.isfinite(x).all() for x in (*sums, *gradients))
    assert sums[1] > 1e5


@pytest.mark.parametrize('place', [(1, 1, False), (2, 4, True)], ids=['1x1', '2x4-sp'])
def test_a_token_that_does_not_count_has_no_gradient(place):
    _, (dx, _) = sums_and_gradients(place, *TERMS[-1])
    np.testing.assert_array_equal(dx.any(-1), WEIGHT != 0)
