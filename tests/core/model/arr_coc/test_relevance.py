"""Relevance is learned, the same wherever its scorers are, and costs one small all-gather."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from support import exhaustive, slow

from megajax.core.model.arr_coc.relevance import (
    DECISION,
    NUM_FEATURES,
    NUM_SUMMARIES,
    Balance,
    Coupling,
    RelevanceParameters,
    Scorers,
    assess,
    definitions,
    query,
    question,
)
from megajax.core.model.arr_coc.texture import CHANNELS
from megajax.core.model.dropout import sequence_keys
from megajax.core.parallel.mesh import make_mesh

ROWS, REGIONS, HIDDEN, WIDTH = 4, 6, 32, 16
COLLECTIVES = 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'collective-permute'
random = np.random.default_rng(0)
TEXTURE = random.random((ROWS, REGIONS, len(CHANNELS)), 'f4')
QUERY = random.normal(size=(ROWS, WIDTH)).astype('f4')
ON_GATE = random.normal(size=(ROWS, REGIONS)).astype('f4')  # what a loss might be by each gate


def parameters(hidden: int = HIDDEN, width: int = WIDTH) -> RelevanceParameters:
    """Random parameters of three scorers, of one shard each and without padding."""
    random = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / np.sqrt(shape[-2])).astype('f4')

    return RelevanceParameters(
        Coupling(normal(len(CHANNELS), 8), normal(8, width)),
        Scorers(
            normal(3, NUM_FEATURES, hidden),
            normal(3, width, hidden),
            normal(3, hidden),
            normal(3, hidden),
        ),
        Balance(normal(NUM_SUMMARIES, 8), normal(width, 8), normal(8, 3)),
    )


def num_slots(shards: int, model: int) -> int:
    """The least multiple of `model` that fits the shards of all three scorers."""
    return -(-3 * shards // model) * model


def in_slots(scorers: Scorers, shards: int, model: int) -> Scorers:
    """The scorers in slots, with numbers in the unused ones that must not matter."""

    def split(x: np.ndarray) -> np.ndarray:
        parts = np.stack(np.split(x, shards, -1), 1).reshape(3 * shards, *x.shape[1:-1], -1)
        unused = num_slots(shards, model) - len(parts)
        return np.concatenate([parts, np.full((unused, *parts.shape[1:]), 7, 'f4')])

    return Scorers(*map(split, scorers))


def together(scorers: Scorers, shards: int) -> Scorers:
    """The inverse of `in_slots`."""

    def join(x: np.ndarray) -> np.ndarray:
        parts = np.asarray(x)[: 3 * shards]
        parts = parts.reshape(3, shards, *parts.shape[1:])
        return np.concatenate(list(parts.swapaxes(0, 1)), -1)

    return Scorers(*map(join, scorers))


def loss(params, texture, query_BD, on_gate, row_B, shards, noise):
    """What the rows of a data shard add to a loss, with their relevance."""
    keys = sequence_keys(jax.random.key(3), row_B) if noise else None
    result = assess(texture, query_BD, params, shards=shards, key_B=keys)
    return (result.gate * on_gate).sum(), result


@functools.cache
def compiled(data: int, model: int, shards: int, noise: bool, hidden=HIDDEN, width=WIDTH):
    """The loss and its gradients compiled on a mesh, and their arguments."""
    params = parameters(hidden, width)
    params = params._replace(scorers=in_slots(params.scorers, shards, model))
    replicated = jax.tree.map(lambda x: P(*(None,) * x.ndim), params)
    sharded = Scorers(*(P('model', *(None,) * (x.ndim - 1)) for x in params.scorers))
    query_BD = np.resize(QUERY, (ROWS, width))
    rows = TEXTURE, query_BD, ON_GATE, np.arange(ROWS, dtype=np.int32)
    rows = [x.reshape(data, -1, *x.shape[1:]) for x in rows]
    arguments = [
        jax.tree.map(jax.device_put, params, replicated._replace(scorers=sharded)),
        *(jax.device_put(x, P('data', *(None,) * (x.ndim - 1))) for x in rows),
    ]
    function = functools.partial(loss, shards=shards, noise=noise)
    mapped = jax.vmap(
        jax.value_and_grad(function, has_aux=True),
        in_axes=(None, 0, 0, 0, 0),
        spmd_axis_name='data',
    )
    return jax.jit(mapped).lower(*arguments).compile(), arguments


@functools.cache
def results(data: int, model: int, shards: int, noise: bool = False):
    """Relevance, gates, scores and weights, and all gradients, in the order of rows."""
    with jax.set_mesh(make_mesh(data, model)):
        program, arguments = compiled(data, model, shards, noise)
        (_, found), gradients = program(*arguments)
        gradients = jax.tree.map(lambda x: np.asarray(x).sum(0), gradients)
        scorers = together(gradients.scorers, shards)
        found = jax.tree.map(np.asarray, found)
        by_row = [np.concatenate(x) for x in (found.relevance, found.gate, found.weights)]
        scores = np.concatenate(found.scores, 1)
        return [*by_row, scores], gradients._replace(scorers=scorers)


@pytest.mark.parametrize('shards', [1, 2])
@pytest.mark.parametrize(('data', 'model'), [slow(1, 1), exhaustive(1, 2), (2, 4), slow(1, 8)])
def test_relevance_and_gradients_are_the_same_wherever_the_scorers_are(data, model, shards):
    (relevance, gate, *values), gradients = results(1, 1, 1)
    (relevance_there, gate_there, *others), also = results(data, model, shards)
    # What is equal to 1e-6 is multiplied before it is exponentiated.
    assert np.abs(relevance_there - relevance).max() <= DECISION * 1e-6
    values, others = [*values, gate], [*others, gate_there]
    expected, actual = jax.tree.leaves((values, gradients)), jax.tree.leaves((others, also))
    for x, y in zip(expected, actual, strict=True):
        assert np.abs(y - x).max() <= 1e-6 * max(1, np.abs(x).max())


def test_every_parameter_of_each_scorer_has_a_gradient():
    _, gradients = results(1, 1, 1)
    for gradient in gradients.scorers:
        assert (np.abs(gradient).reshape(3, -1).max(1) > 1e-5).all()
    for gradient in (*gradients.coupling, *gradients.balance):
        assert np.abs(gradient).max() > 1e-5


@pytest.mark.parametrize(('shards', 'noise'), [(1, True), (2, False), slow(2, True)])
def test_a_step_has_one_all_gather_of_scores_and_no_other_collective(shards, noise):
    with jax.set_mesh(make_mesh(2, 4)):
        text = compiled(2, 4, shards, noise)[0].as_text()
    made = re.findall(rf'= (\S+) ({"|".join(COLLECTIVES)})(?:-start)?\(', text)
    assert [kind for _, kind in made] == ['all-gather']
    slots = num_slots(shards, 4)
    assert f'[1,{slots},{ROWS // 2},{REGIONS}]' in made[0][0] or (
        f'[{slots},1,{ROWS // 2},{REGIONS}]' in made[0][0]
    )


def test_a_device_of_four_computes_a_third_of_the_scorers():
    flops = []
    for model in (1, 4):
        with jax.set_mesh(make_mesh(1, model)):
            program, _ = compiled(1, model, 1, noise=False, hidden=1024, width=256)
            flops.append(program.cost_analysis()['flops'])
    assert flops[1] <= 0.36 * flops[0]


def test_noise_depends_on_the_row_alone_and_changes_no_gate():
    for place in ((1, 1), (2, 4)):
        quiet, _ = results(*place, 1)
        (relevance, gate, *_), _ = results(*place, 1, noise=True)
        np.testing.assert_allclose(relevance, results(1, 1, 1, noise=True)[0][0], atol=1e-5)
        np.testing.assert_allclose(gate, quiet[1], rtol=1e-6)  # another program: an ulp
        assert np.abs(relevance - quiet[0]).max(1).mean() > 0.1
        assert (relevance.min(1) == 0).all()
        assert relevance.max(1) == pytest.approx(np.ones(ROWS))


def test_gates_are_one_on_average():
    (_, gate, weights, _), _ = results(1, 1, 1)
    assert gate.mean(1) == pytest.approx(np.ones(ROWS))
    assert weights.sum(1) == pytest.approx(np.ones(ROWS))
    assert gate.std() > 0.01


def test_scorers_start_as_their_definitions():
    params = parameters()
    scorers = params.scorers._replace(out=np.zeros_like(params.scorers.out))
    with jax.set_mesh(make_mesh(1, 1)):
        params = jax.tree.map(jnp.asarray, params._replace(scorers=scorers))
        arrays = jnp.asarray(TEXTURE), jnp.asarray(QUERY)
        scores = np.asarray(jax.jit(functools.partial(assess, shards=1))(*arrays, params).scores)
        start = np.asarray(jax.jit(definitions)(*arrays, params.coupling))
    np.testing.assert_allclose(scores, start, atol=1e-6)
    p = np.exp(TEXTURE) / np.exp(TEXTURE).sum(2, keepdims=True)
    entropy = -(p * np.log(p)).sum(2)
    low, high = entropy.min(1, keepdims=True), entropy.max(1, keepdims=True)
    np.testing.assert_allclose(start[0], (entropy - low) / (high - low), atol=1e-4)
    np.testing.assert_array_equal(start[1], TEXTURE[:, :, 7])
    texture, out = parameters().coupling
    vector = np.maximum(TEXTURE @ texture, 0) @ out
    norms = np.linalg.norm(vector, axis=2) * np.linalg.norm(QUERY, axis=1, keepdims=True)
    cosine = np.einsum('brd,bd->br', vector, QUERY) / norms
    np.testing.assert_allclose(start[2], (cosine + 1) / 2, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbors():
    with jax.set_mesh(make_mesh(1, 1)):
        params = jax.tree.map(jnp.asarray, parameters())

        def gate(texture, query_BD):
            return assess(texture, query_BD, params, shards=1).gate

        def first(texture, query_BD):
            return gate(texture, query_BD)[0] @ ON_GATE[0]

        by_texture, by_query = jax.jit(jax.grad(first, (0, 1)))(
            jnp.asarray(TEXTURE), jnp.asarray(QUERY)
        )
    assert np.asarray(by_texture[0]).any()
    assert not np.asarray(by_texture[1:]).any()
    assert not np.asarray(by_query).any()


def test_the_question_is_the_text_before_the_answer():
    #        image image what  is   it   ?    a    b   end
    loss = [[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]]
    image = [[0, 1, -1, -1, -1, -1, -1, -1, -1]]
    found = question(jnp.array(loss), jnp.array(image))
    assert found.tolist() == [[False, False, True, True, True, True, False, False, False]]
    assert question(0 * jnp.array(loss), jnp.array(image)).tolist() == [[False] * 2 + [True] * 7]


def test_the_query_is_the_sum_of_the_question_of_rms_one_and_no_other_token_matters():
    x_BSD = random.normal(size=(2, 5, 8)).astype('f4')
    asked = np.array([[False, True, True, False, False], [False] * 5])
    other = np.where(asked[:, :, None], x_BSD, np.nan)
    found = np.asarray(query(jnp.asarray(other), jnp.asarray(asked)))
    total = x_BSD[0, 1:3].sum(0)
    expected = total / np.sqrt((total * total).mean())
    np.testing.assert_allclose(found, [expected, np.zeros(8)], atol=1e-6)
