"""The decoder looks back and never ahead, stays inside a document, and knows nothing of how it is
run.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from flax import nnx
from support import (
    assert_close,
    by_name,
    exhaustive,
    gather,
    graph_of,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    relative_error,
    slow,
)

from megajax.core.config import Config
from megajax.core.config.overlap_rules import Overlap
from megajax.core.counts.declaration import Parameter, Role, base_sizes
from megajax.core.counts.parameters import dim_sizes
from megajax.core.model import attention, sublayer, transformer
from megajax.core.model.attention import attention_core
from megajax.core.model.computation import IN_FP32, Computation
from megajax.core.model.dropout import sequence_keys
from megajax.core.model.embedding import VocabParallelEmbedding
from megajax.core.model.loss import Loss
from megajax.core.model.parameters import Parameters
from megajax.core.model.rows import Rows
from megajax.core.model.transformer import LanguageModel, make_model
from megajax.core.parallel.layout import Layout
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients

LENGTH = 16
TOKENS = (
    np.random.default_rng(0).permutation(1000)[:LENGTH].astype(np.int32)[None]
)  # none twice: each row of the table is one place
SEGMENTS = np.repeat(np.arange(3), [5, 8, 3]).astype(np.int32)[None]
POSITIONS = np.concatenate([np.arange(5), np.arange(8), np.arange(3)]).astype(np.int32)[None]

both_models = pytest.mark.parametrize('name', [exhaustive('gpt'), 'llama'])


def small(name: str, *mesh: int, sequence_parallel: bool = False, **model: object) -> Config:
    model = {'dropout': 0.0, 'tie_embeddings': False} | model
    return make_config(
        name,
        *mesh,
        sequence_parallel=sequence_parallel,
        model=model,
        train={'seq_len': LENGTH, 'batch_size': 2},
    )


def make_decoder(config: Config) -> LanguageModel:
    """A decoder with parameters so large that attention is far from uniform."""
    return nnx.merge(graph_of(config), random_params(config, std=0.3))


def new_model(config: Config) -> LanguageModel:
    return make_model(config.model, Layout.of(config), key=jax.random.key(0))


def placed(x_BS: np.ndarray) -> jax.Array:
    return place_batch({'x': x_BS})['x']


def logits(
    model: LanguageModel, token_BS: np.ndarray = TOKENS, **documents: np.ndarray
) -> np.ndarray:
    """The logits of tokens, without those of padding."""
    all_logits = forward(*nnx.split(model), token_BS, documents)
    return np.asarray(all_logits)[..., : model.config.vocab_size]


@functools.partial(jax.jit, static_argnums=0)
def forward(
    graph: nnx.GraphDef, params: nnx.State, token_BS: jax.Array, documents: dict[str, jax.Array]
) -> jax.Array:
    return nnx.merge(graph, params)(token_BS, IN_FP32, **documents)


def influence(config: Config, **documents: np.ndarray) -> np.ndarray:
    """[t, s]: how much the logits of place t, added up with random weights, change with the
    embedding of place s.
    """
    weight_V = np.random.default_rng(2).normal(size=config.model.padded_vocab_size).astype('f4')
    weight_V[config.model.vocab_size :] = 0
    with on_mesh(config):
        graph, params = nnx.split(make_decoder(config))

        def mixed_logits(params: nnx.State) -> jax.Array:
            made = nnx.merge(graph, params)(TOKENS, IN_FP32, **documents)
            return (made * weight_V[None, None]).sum((0, 2))

        gradients = jax.jit(
            lambda params: by_name(jax.jacrev(mixed_logits)(params))['embedding.table']
        )(params)
        return np.abs(np.asarray(gradients)[:, TOKENS[0]]).max(-1)


@both_models
def test_no_logit_depends_on_a_later_token_and_each_on_every_earlier_one(name):
    depends = influence(small(name)) != 0
    np.testing.assert_array_equal(depends, np.tril(np.ones((LENGTH, LENGTH), bool)))


@both_models
def test_no_logit_depends_on_another_document(name):
    depends = influence(small(name), segment_BS=SEGMENTS, position_BS=POSITIONS) != 0
    same = SEGMENTS[0][:, None] == SEGMENTS[0][None, :]
    np.testing.assert_array_equal(depends, np.tril(same))


@both_models
def test_a_packed_document_has_the_logits_that_it_has_alone(name):
    config = small(name)
    with on_mesh(config):
        model = make_decoder(config)
        packed, alone = (
            logits(model, segment_BS=SEGMENTS, position_BS=POSITIONS),
            logits(model, TOKENS[:, 5:13]),
        )
    assert relative_error(packed[:, 5:13], alone) < 1e-5


def test_rotary_attention_sees_how_far_apart_places_are_and_not_where():
    config, place = small('llama'), np.arange(LENGTH, dtype=np.int32)[None]
    with on_mesh(config):
        model = make_decoder(config)
        here, shifted, stretched = (
            logits(model, position_BS=position_BS)
            for position_BS in (place, place + 1000, 2 * place)
        )
    assert relative_error(shifted, here) < 1e-4
    assert relative_error(stretched, here) > 1e-2


@both_models
def test_scanned_layers_are_the_layers_one_after_another_and_jit_changes_nothing(name):
    config = small(name)
    with on_mesh(config):
        layout = Layout.of(config)
        model, loss, token_BS = make_decoder(config), Loss.of(config, layout), placed(TOKENS)
        label_BS, weight_BS = token_BS, placed(np.ones(TOKENS.shape, 'f4'))
        graph, params = nnx.split(model)
        layer_graph = nnx.graphdef(model.layers)

        def scanned(params: nnx.State) -> jax.Array:
            model = nnx.merge(graph, params)
            return loss(model.hidden(token_BS, IN_FP32)[0], model.head_Vd, label_BS, weight_BS)[0]

        def looped(params: nnx.State) -> jax.Array:
            model = nnx.merge(graph, params)
            positions = model.position and model.position(token_BS, None)
            x_BSD = model.embedding(token_BS, jnp.float32, positions, '-')
            for index in range(config.model.num_layers):
                layer = nnx.merge(
                    layer_graph, jax.tree.map(lambda x, index=index: x[index], params['layers'])
                )
                x_BSD, _ = layer(x_BSD, attention_core(config.model, layout))
            return loss(model.norm(x_BSD), model.head_Vd, label_BS, weight_BS)[0]

        (expected, gradients), (actual, actual_gradients) = (
            jax.jit(jax.value_and_grad(f))(params) for f in (looped, scanned)
        )
        assert relative_error(actual, expected) < 1e-6
        assert relative_error(scanned(params), actual) < 1e-6
        assert_close(gather(actual_gradients), gather(gradients), 1e-5)


@pytest.mark.parametrize('tied', [slow(True), False])
def test_padding_of_the_vocabulary_has_no_probability_and_its_rows_no_gradient(tied):
    config = small('gpt', 1, 4, sequence_parallel=True, tie_embeddings=tied)
    with on_mesh(config):
        graph, params = nnx.split(make_decoder(config))

        probability = jax.nn.softmax(forward(graph, params, TOKENS, {}))
        assert not np.asarray(probability)[..., 1000:].any()
        step = jax.jit(make_loss_and_gradients(config))
        gradients = gather(step(params, place_batch(make_batch(config)), jax.random.key(0))[1])
    for table in ('embedding.table',) if tied else ('embedding.table', 'head'):
        assert gradients[table][:1000].any()
        assert not gradients[table][1000:].any()


def test_more_padding_changes_no_logit(monkeypatch):
    config = small('gpt', 1, 2)
    with on_mesh(config):
        model = make_decoder(config)
        expected = logits(model)
        monkeypatch.setattr('megajax.core.config.model.VOCAB_MULTIPLE', 2048)
        monkeypatch.setattr('megajax.core.model.parameters.dim_sizes', inspect.unwrap(dim_sizes))
        monkeypatch.setattr('megajax.core.counts.parameters.base_sizes', inspect.unwrap(base_sizes))
        monkeypatch.setattr('support._abstract_state', inspect.unwrap(support._abstract_state))
        wider = make_decoder(config)
        assert wider.head_Vd.shape[0] == 2 * model.head_Vd.shape[0] == 2048
        nnx.update(wider, jax.tree.map(over, nnx.state(model), nnx.state(wider)))
        assert relative_error(logits(wider), expected) < 1e-6


def over(x: jax.Array, wide: jax.Array) -> jax.Array:
    """`wide` with its first rows as those of x."""
    return jax.device_put(
        np.concatenate([np.asarray(x), np.asarray(wide)[len(x) :]]), wide.sharding
    )


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_the_table_adds_up_in_fp32_what_each_place_of_a_token_gets(dtype):
    config, random = small('gpt', 2, 4, sequence_parallel=True), np.random.default_rng(0)
    token_BS, dx_BSD = (
        random.integers(5, size=(4, 64)),
        random.normal(size=(4, 64, 16)).astype(dtype),
    )
    expected = np.zeros((1024, 16))
    np.add.at(expected, token_BS, dx_BSD.astype(np.float64))
    with on_mesh(config):
        declared = {'table': Parameter('VD', Role.MATRIX, std=1.0)}
        parameters = Parameters(declared, {'V': 1024, 'D': 16}, Layout.of(config))
        embedding = VocabParallelEmbedding(parameters, key=jax.random.key(0))

        @jax.jit
        def both(embedding, token_BS, dx_BSD):
            x_BSD, pullback = jax.vjp(lambda model: model(token_BS, dtype), embedding)
            return x_BSD, *pullback(jax.reshard(dx_BSD, jax.typeof(x_BSD).sharding.spec))

        tokens = jax.device_put(token_BS, jax.P('data', None))
        x_BSD, gradient = both(embedding, tokens, dx_BSD)
        np.testing.assert_array_equal(
            np.asarray(x_BSD), np.asarray(embedding.table[...]).astype(dtype)[token_BS]
        )
    assert gradient.table.dtype == jnp.float32
    assert relative_error(gradient.table[...], expected) < 1e-6


def test_every_place_of_the_model_and_every_row_has_its_own_dropout_key(monkeypatch):
    keys = []

    def record(x: jax.Array, rate: float, key_B: jax.Array, row: jax.P) -> jax.Array:
        jax.debug.callback(
            lambda data: keys.extend(map(tuple, np.asarray(data))), jax.random.key_data(key_B)
        )
        return x

    for module in (transformer, sublayer, attention):
        monkeypatch.setattr(module, 'dropout', record)
    config = small('gpt', dropout=0.1)
    with on_mesh(config):
        token_BS = np.concatenate([TOKENS, TOKENS])
        key_B = sequence_keys(jax.random.key(0), jnp.arange(2))
        make_decoder(config).hidden(token_BS, IN_FP32, Rows(key_B=key_B))
        jax.effects_barrier()
    assert (
        len(keys) == len(set(keys)) == 2 * (1 + 3 * config.model.num_layers)
    )  # the embedding; attention and two branches of a layer


@pytest.mark.parametrize('name', [slow('gpt'), 'llama', slow('bert')])
def test_weights_begin_at_init_std_and_those_that_add_to_the_residual_stream_at_less(name):
    config = make_config(name, model={'num_layers': 3, 'init_std': 0.05})
    with on_mesh(config):
        params = gather(jax.jit(lambda: nnx.state(new_model(config)))())
    for path, values in params.items():
        if 'norm' in path or 'bias' in path:
            assert (values == (1 if path.endswith('norm.weight') else 0)).all(), path
            continue
        adds = path in ('layers.attention.out.weight', 'layers.mlp.down.weight')
        expected = 0.05 / math.sqrt(2 * 3) if adds else 0.05  # Radford et al. (2019)
        error = 4 / math.sqrt(2 * values.size)  # four standard deviations of what is measured
        assert np.square(values).mean() ** 0.5 == pytest.approx(expected, rel=error), path
        assert abs(values.mean()) < 4 * expected / math.sqrt(values.size), path
        assert values.size < 1000 or error < 0.1


@pytest.mark.parametrize('in_order', [False, slow(True)], ids=['plain', 'in order'])
@pytest.mark.parametrize('name', ['gpt', slow('llama')])
def test_recomputation_keeps_less_for_the_backward_pass(name, in_order):
    """Selective keeps no scores, full nothing of a layer but its input."""
    kept: dict[str, list[tuple[int, ...]]] = {}
    for recompute in ('none', 'selective', 'full'):
        config = make_config(
            name,
            model={'dropout': 0.1, 'num_layers': 1},
            train={'recompute': recompute, 'seq_len': 24, 'batch_size': 2},
        )
        with on_mesh(config):
            kept[recompute] = [
                x.shape for x in jax.eval_shape(lambda config=config: residuals(config, in_order))
            ]
    scores = {how: sum(shape[-2:] == (24, 24) for shape in shapes) for how, shapes in kept.items()}
    assert scores['none'] > scores['selective'] == scores['full'] == 0
    none, selective, full = (sum(map(math.prod, shapes)) for shapes in kept.values())
    assert full < selective < none


def residuals(config: Config, in_order: bool) -> list[jax.Array]:
    """What the backward pass of the layers, or of two parts in order, reads of the forward pass."""
    graph, params = nnx.split(new_model(config))
    token_BS = jnp.zeros((2, 24), jnp.int32, out_sharding=Layout.of(config)('BS'))
    key_B, computation = jax.random.split(jax.random.key(0), 2), Computation.of(config)
    if in_order:
        overlap = Overlap(num_parts=2, in_order=True, unroll=True)
        computation = computation._replace(overlap=overlap)

    def hidden(params: nnx.State) -> jax.Array:
        return nnx.merge(graph, params).hidden(token_BS, computation, Rows(key_B=key_B))[0]

    h_BTD, pull = jax.vjp(hidden, params)
    (gradients,) = pull(h_BTD)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)
    return jax.tree.leaves(pull)
