"""The same numbers on every mesh: initial weights and dropout masks bit for bit, the rest up to the
order of sums.

Errors are relative to the largest element: max |a - b| / max |b|, for each parameter by itself.
"""

import functools
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import (
    assert_close,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    pack,
    random_params,
    relative_error,
    slow,
)

from megajax.core.config import Config
from megajax.core.model.attention import attend
from megajax.core.model.dropout import dropout, sequence_keys
from megajax.core.parallel.layout import Layout, batch_layout
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state, make_train_step

Place = tuple[int, int, bool]
Places = Collection[Place]
STEPS = 5
DOCUMENTS = [10, 15, 7]  # lengths in a row
LIMIT = {'float32': 1e-5, 'bfloat16': 2e-2}
ONE_DEVICE = (1, 1, False)
MESHES = [(2, 1), (1, 2), (2, 2), (1, 4), (4, 2), (2, 4), (1, 8)]
PLACES = [
    (data, model, parallel)
    for data, model in MESHES
    for parallel in (False, True)
    if model > 1 or not parallel
]

QUICK = [(2, 2, True)]
SLOW = [(2, 4, True), (1, 8, False)]  # `.ci/full` has the others


def place_id(place: Place) -> str:
    data, model, sequence_parallel = place
    return f'{data}x{model}{"-sp" * sequence_parallel}'


both_models = pytest.mark.parametrize('name', ['gpt', slow('llama')])


def at(place: Place, *values: str, quick: Places = QUICK, later: Places = SLOW) -> Any:
    """A case of `make test` where the place is in `quick`, of `make test-slow` where in `later`."""
    marks = () if place in quick else slow().marks if place in later else exhaustive().marks
    return pytest.param(*values, place, id='-'.join([*values, place_id(place)]), marks=marks)


every_mesh = pytest.mark.parametrize('place', [at(place) for place in PLACES])
# Of BERT only what it does not share with the others would show here.
BERT_PLACES = [(2, 2, False), (2, 2, True), (1, 4, True)]
# And of OLMo 2 its norms, with as many key/value heads as devices, and with fewer.
OLMO2_PLACES = [(2, 2, True), (1, 4, False), (1, 8, False)]
# And of a pattern of layers its loop over periods and the layers left over. On the
# quick mesh this also covers `llama`.
WINDOW_PLACES = [(2, 2, True), (1, 8, False)]
every_model_and_mesh = pytest.mark.parametrize(
    ('name', 'place'),
    [at(place, 'llama', quick=(), later=()) for place in PLACES]
    + [at(place, 'gpt', quick=(), later=()) for place in PLACES]
    + [at(place, 'bert', quick=()) for place in BERT_PLACES]
    + [at(place, 'olmo2', quick=(), later=()) for place in OLMO2_PLACES]
    + [at(place, 'layer_norms', quick=()) for place in OLMO2_PLACES]
    + [at(place, 'windows', later=()) for place in WINDOW_PLACES]
    + [at(place, 'sinks', quick=(), later=()) for place in WINDOW_PLACES],
)


# Two periods and a layer left over, of fewer kinds of layers to compile than in `support.MODELS`.
PATTERN = {'num_layers': 5, 'layers': [{'window': 4, 'rope_theta': 1e6}, {'position': 'none'}]}


def sizes(name: str) -> dict[str, Any]:
    return PATTERN if name == 'windows' else {}


@functools.cache
def initial(name: str) -> dict[str, np.ndarray]:
    """The parameters before the first step, made on one device."""
    config = make_config(name)
    with on_mesh(config):
        return gather(init_state(config).params)


# Without sequence parallelism, which leaves parameters where they are
# (tests/core/parallel/test_layout.py).
@pytest.mark.parametrize(
    'place', [at((*mesh, False), quick=[(2, 4, False)], later=()) for mesh in MESHES]
)
@both_models
def test_initial_parameters_are_bit_identical(name, place):
    config = make_config(name, *place[:2])
    with on_mesh(config):
        actual = gather(init_state(config).params)
    for parameter, expected in initial(name).items():
        np.testing.assert_array_equal(actual[parameter], expected, err_msg=parameter, strict=True)


def start(config: Config) -> nnx.State:
    """Random parameters, and gains near one: far smaller ones would make scores too equal for the
    norms of queries and keys to move.
    """

    def near_one(path: Any, x: jax.Array) -> jax.Array:
        is_gain = re.search(r'norm.*weight', jax.tree_util.keystr(path))
        return jax.device_put(np.asarray(x) + 1, x.sharding) if is_gain else x

    return jax.tree.map_with_path(near_one, random_params(config, std=0.05))


class Training(NamedTuple):
    losses: list[float]
    gradients: dict[str, np.ndarray]  # of the first step
    params: dict[str, np.ndarray]  # after the last


def train(name: str, place: Place) -> Training:
    # Adam divides each element of a gradient by its own size, so an element that is nothing but
    # rounding error, as all are of the key bias (softmax is blind to it), would move by lr
    # whichever way it was rounded. An eps above rounding error holds it still.
    config = make_config(
        name,
        *place[:2],
        sequence_parallel=place[2],
        model=sizes(name),
        optim={'lr': 3e-3, 'eps': 1e-3},
    )
    batches = [make_batch(config, seed=seed) for seed in range(STEPS)]
    if name in ('llama', 'windows'):
        batches = [pack(batch, DOCUMENTS) for batch in batches]
    with on_mesh(config):
        state, step, losses = init_state(config, start(config)), make_train_step(config), []
        for batch in batches:
            state, metrics = step(state, place_batch(batch))
            losses.append(float(metrics['loss']))
            # Now AdamW's first moment is the gradient but for the factor of clipping and 1 - beta1.
            if len(losses) == 1:
                gradients = gather(optax.tree_utils.tree_get(state.opt_state, 'mu'))
        return Training(losses, gradients, gather(state.params))


train_on_one_device = functools.cache(functools.partial(train, place=ONE_DEVICE))


@every_model_and_mesh
def test_loss_gradients_and_parameters_after_five_steps_are_those_of_one_device(name, place):
    expected, actual = train_on_one_device(name), train(name, place)
    assert relative_error(actual.losses, expected.losses) <= LIMIT['float32']
    assert_close(actual.gradients, expected.gradients, LIMIT['float32'])
    assert_close(actual.params, expected.params, LIMIT['float32'])


@pytest.mark.parametrize(
    'name', ['windows', slow('llama'), slow('gpt'), exhaustive('olmo2'), exhaustive('bert')]
)
def test_five_steps_move_every_parameter_far_beyond_the_limit(name):
    config = make_config(name, model=sizes(name))
    with on_mesh(config):
        before = gather(start(config))
    after = train_on_one_device(name).params
    for parameter, x in before.items():
        assert (
            np.abs(after[parameter] - x).max()
            > 100 * LIMIT['float32'] * np.abs(after[parameter]).max()
        ), parameter


def bf16(place: Place) -> tuple[float, dict[str, np.ndarray]]:
    config = make_config(
        'gpt',
        *place[:2],
        sequence_parallel=place[2],
        model={'dropout': 0.0},
        train={'dtype': 'bfloat16'},
    )
    with on_mesh(config):
        params, batch = (
            start(config),
            place_batch(pack(make_batch(config), DOCUMENTS)),
        )
        (loss, _), gradients = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        return float(loss), gather(gradients)


bf16_on_one_device = functools.cache(functools.partial(bf16, ONE_DEVICE))


@pytest.mark.slow
@pytest.mark.parametrize('place', [at(place, later=()) for place in PLACES])
def test_loss_and_gradients_in_bf16_are_those_of_one_device(place):
    (expected, expected_gradients), (actual, gradients) = bf16_on_one_device(), bf16(place)
    assert relative_error(actual, expected) <= LIMIT['bfloat16']
    assert_close(gradients, expected_gradients, LIMIT['bfloat16'])


def test_every_data_shard_has_its_own_count_of_tokens_in_the_loss():
    mask = make_batch(make_config())['loss_mask']
    for data in (2, 4):
        counts = mask.reshape(data, -1).sum(1)
        assert len(set(counts)) == data


RATE, ROWS, LENGTH = 0.1, 8, 32
over_data = batch_layout(['data', 'model'])


def dropped(place: Place, rows: np.ndarray) -> np.ndarray:
    """What dropout leaves of ones, [row, sequence, 16], as the step calls it: each data shard by
    itself.
    """
    config = make_config('gpt', *place[:2], sequence_parallel=place[2])
    layout = Layout.of(config).per_shard

    @functools.partial(jax.vmap, spmd_axis_name='data')
    def drop(row_B: jax.Array) -> jax.Array:
        ones = jnp.ones((*row_B.shape, LENGTH, 16), out_sharding=layout('BTD'))
        return dropout(ones, RATE, sequence_keys(jax.random.key(7), row_B), layout('TD'))

    with on_mesh(config):
        placed = jax.device_put(rows.reshape(place[0], -1), over_data('BS'))
        out = jax.jit(drop)(placed)
        return np.asarray(out).reshape(-1, LENGTH, 16)


def attended(place: Place, rows: np.ndarray) -> np.ndarray:
    """Attention's weights after dropout, [row, query, head, key]: with values that are one-hot,
    they are what attention makes.
    """
    config = make_config('gpt', *place[:2])
    layout = Layout.of(config).per_shard
    like_heads = layout('BSNh')

    @functools.partial(jax.vmap, spmd_axis_name='data')
    def weights(row_B: jax.Array) -> jax.Array:
        q_BSNH = jnp.zeros((*row_B.shape, LENGTH, 8, LENGTH), out_sharding=like_heads)
        one_hot = jnp.broadcast_to(jnp.eye(LENGTH)[None, :, None, :], q_BSNH.shape)
        v_BSNH = jax.reshard(one_hot, like_heads)
        key_B = sequence_keys(jax.random.key(7), row_B)
        return attend(q_BSNH, q_BSNH, v_BSNH, layout, scale=1.0, rate=RATE, key_R=key_B)

    with on_mesh(config):
        placed = jax.device_put(rows.reshape(place[0], -1), over_data('BS'))
        out = jax.jit(weights)(placed)
    return np.asarray(out).reshape(-1, LENGTH, 8, LENGTH)


all_rows = np.arange(ROWS)
dropped_on_one_device = functools.cache(functools.partial(dropped, ONE_DEVICE, all_rows))
attended_on_one_device = functools.cache(functools.partial(attended, ONE_DEVICE, all_rows))


@every_mesh
def test_dropout_masks_are_bit_identical(place):
    np.testing.assert_array_equal(dropped(place, all_rows), dropped_on_one_device())


@pytest.mark.parametrize('place', [at((*mesh, False), quick=[(2, 4, False)]) for mesh in MESHES])
def test_attention_dropout_masks_are_bit_identical(place):
    np.testing.assert_array_equal(attended(place, all_rows), attended_on_one_device())


@pytest.mark.parametrize(
    ('masks', 'whole'), [(dropped, dropped_on_one_device), (attended, attended_on_one_device)]
)
def test_a_microbatch_has_the_masks_that_its_rows_have_in_the_whole_batch(masks, whole):
    rows = np.array([2, 3, 6, 7])  # the second of two microbatches, on two data shards
    np.testing.assert_array_equal(masks((2, 2, False), rows), whole()[rows])


def test_masks_keep_the_share_that_the_rate_asks_for_and_differ_between_rows():
    x = dropped_on_one_device()
    np.testing.assert_allclose(np.unique(x), [0, 1 / (1 - RATE)], rtol=1e-6)
    assert (x == 0).mean() == pytest.approx(RATE, abs=4 * (RATE * (1 - RATE) / x.size) ** 0.5)
    assert len({row.tobytes() for row in x}) == ROWS
    weights = attended_on_one_device()
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))[None, :, None, :]
    assert (weights[np.broadcast_to(causal, weights.shape)] == 0).mean() == pytest.approx(
        RATE, abs=0.01
    )
    assert not weights[np.broadcast_to(~causal, weights.shape)].any()
