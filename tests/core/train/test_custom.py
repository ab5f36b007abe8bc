"""A training loop of one's own has the loss and the gradients of the training step."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from optax.contrib import muon
from steps import CLIPPED, own_step_of, step_of
from support import (
    abstract_state,
    assert_close,
    exhaustive,
    gather,
    graph_of,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    random_state,
    slow,
)

import megajax
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.model.transformer import LanguageModel
from megajax.core.parallel.mesh import check_current_mesh
from megajax.core.train.evaluation import make_eval_step

EXPERTS = 'model.experts={count: 4, active: 2, ffn_size: 64, balance_loss: 0.01}'
BIAS = 'model.experts.selection_bias=true'


def config_of(
    mesh: dict[str, Any], train: dict[str, Any], shard: str, *, dropout: float = 0.1
) -> Config:
    sizes: dict[str, Any] = {'num_layers': 2, 'hidden_size': 32, 'num_heads': 4, 'ffn_size': 64}
    sizes['dropout'] = 0.0 if mesh.keys() & {'context', 'stages'} else dropout
    return make_config(
        'gpt',
        model=sizes,
        mesh={'data': 1, 'model': 1, **mesh},
        train={'batch_size': 8, 'seq_len': 16, **train},
        optim={'shard': shard},
    )


def batch_of(config: Config) -> dict[str, np.ndarray]:
    """A batch in which rows count different numbers of tokens."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.model.vocab_size, (8, 17), np.int32)
    mask = (np.arange(16) < np.arange(2, 10)[:, None]).astype(np.float32)
    return {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': mask}


@pytest.mark.parametrize(
    'config',
    [
        CLIPPED,
        exhaustive(config_of({}, {}, 'none')),
        exhaustive(config_of({'data': 2, 'model': 2}, {'microbatches': 2}, 'weights')),
        slow(config_of({'data': 2, 'stages': 2}, {'microbatches': 2}, 'optimizer')),
        exhaustive(config_of({'context': 2, 'model': 2}, {}, 'none')),
    ],
    ids=['2x2 clipped', '1x1', '2x2', 'stages', 'context'],
)
def test_value_and_grad_of_the_loss_updates_the_parameters_as_the_training_step_does(
    config: Config,
) -> None:
    with on_mesh(config):
        batch = megajax.place_batch(make_batch(config))
        state = random_state(config)
        loss, gradients, updated = own_step_of(config)(state.params, state.opt_state, batch)
        norm = np.linalg.norm(np.concatenate([x.ravel() for x in gather(gradients).values()]))
        state, metrics = step_of(config)(state, batch)
        assert float(loss) == pytest.approx(float(metrics['loss']), rel=1e-6)
        assert float(norm) == pytest.approx(float(metrics['grad_norm']), rel=1e-5)
        assert_close(gather(updated), gather(state.params), 1e-5)


@pytest.mark.parametrize(
    ('optimizer', 'multiplies_matrices'),
    [
        exhaustive(optax.lion(1e-3), False),
        slow(optax.adafactor(1e-2), False),
        slow(muon(1e-2), True),
    ],
)
def test_an_optimizer_of_optax_trains_sharded_parameters(
    optimizer: optax.GradientTransformationExtraArgs, multiplies_matrices: bool
) -> None:
    config = config_of({'data': 2, 'model': 2}, {}, 'weights', dropout=0.0)
    with on_mesh(config):
        batch = megajax.place_batch(batch_of(config))
        params = random_params(config, std=0.05)
        opt_state, losses = jax.jit(optimizer.init)(params), []
        placed, of_state = jax.tree.map(lambda x: x.sharding, (params, opt_state))
        update = optimizer.update
        if multiplies_matrices:  # as the page on Python says
            update = jax.sharding.auto_axes(update, out_sharding=(placed, of_state))

        @jax.jit
        def step(params: Any, opt_state: Any) -> Any:
            loss, gradients = jax.value_and_grad(megajax.loss)(params, batch, config)
            updates, opt_state = update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        for _ in range(4):
            params, opt_state, loss = step(params, opt_state)
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        assert jax.tree.map(lambda x: x.sharding, params) == placed


@pytest.mark.parametrize(
    ('keys', 'key'),
    [
        (['train.dtype=fp8'], 'train.dtype'),
        (['train.dtype=float16'], 'train.dtype'),
        (['lora.rank=4'], 'lora'),
        ([EXPERTS], 'model.experts.balance_loss'),
        ([EXPERTS, 'model.experts.balance_over=sequence'], None),
        ([EXPERTS, 'model.experts.balance_loss=0', BIAS], 'model.experts.selection_bias'),
    ],
)
def test_what_needs_more_than_parameters_and_a_batch_is_refused_by_key(
    keys: list[str], key: str | None
) -> None:
    config = megajax.load('tiny', ['mesh.data=1', 'mesh.model=1', *keys])
    with pytest.raises(ConfigError) as caught:
        megajax.loss(None, {}, config)
    # The mesh, the parameters and the batch are checked only after the config.
    assert [problem.path for problem in caught.value.problems] == [key or 'mesh']


@pytest.mark.parametrize(
    ('name', 'names', 'message'),
    [
        (
            'gpt',
            ['tokens'],
            r'batch: has no labels and no loss_mask; give the arrays labels \[rows, tokens\], ',
        ),
        (
            'bert',
            ['tokens', 'labels', 'loss_mask', 'token_types'],
            r'batch: has no swapped; give the array swapped \[rows, 1\]',
        ),
    ],
)
def test_a_batch_without_what_the_loss_needs_is_rejected_before_anything_compiles(
    name: str, names: list[str], message: str
) -> None:
    config, batch = make_config(name), {name: np.zeros((8, 16), np.int32) for name in names}
    with on_mesh(config):
        state = abstract_state(config)
        with pytest.raises(ConfigError, match=message):
            jax.eval_shape(lambda params: megajax.loss(params, batch, config), state.params)
        with pytest.raises(ConfigError, match=message):
            megajax.make_train_step(config).trace(state, batch)


GROUPS = {'count': 4, 'active': 2, 'ffn_size': 64, 'capacity': 1.0, 'capacity_group': 8}


@pytest.mark.parametrize(
    ('shape', 'keys', 'message'),
    [
        ((8, 64), {}, '64 exceeds model.max_seq_len=32'),
        ((6, 32), {'mesh': {'data': 2}, 'train': {'microbatches': 2}}, '6 is not a multiple of'),
        ((8, 18), {'mesh': {'context': 2}}, '18 is not a multiple of 4'),
        ((8, 16), {'mesh': {'context': 2}, 'model': {'window': 8}}, 'a window of 8 tokens'),
        # Tokens beyond the last group would take the slots of another expert.
        ((8, 12), {'model': {'experts': GROUPS}}, 'model.experts.capacity_group: 8 '),
        (
            (8, 24),
            {'model': {'experts': GROUPS}, 'mesh': {'context': 2}},
            'model.experts.capacity_group: 8 ',
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_config_is_rejected(
    shape: tuple[int, int], keys: dict[str, dict[str, object]], message: str
) -> None:
    config = make_config('gpt', **{**keys, 'model': {'dropout': 0, **keys.get('model', {})}})
    batch = {name: np.zeros(shape, np.int32) for name in ('tokens', 'labels', 'loss_mask')}
    with on_mesh(config), pytest.raises(ConfigError, match=f'^batch: .*{re.escape(message)}'):
        jax.eval_shape(
            lambda params: megajax.loss(params, batch, config), abstract_state(config).params
        )


@pytest.mark.parametrize('dropout', [0.0, 0.1])
def test_auto_overlap_on_gpus_is_chosen_for_the_batch_and_rejects_none(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch of an epoch may be too small to be split by sequence."""
    model = {'dropout': dropout, 'attention_dropout': 0.0}
    config = make_config('gpt', 2, 2, model=model, train={'overlap': 'auto', 'unroll': 'auto'})
    assert resolved(config, on_gpu=True).train.overlap == 'batch_split'
    monkeypatch.setattr('megajax.core.train.gradients.mesh_target', lambda: 'h100')
    batch = {name: np.zeros((6, 16), np.int32) for name in ('tokens', 'labels', 'loss_mask')}
    with on_mesh(config):
        params, placed = abstract_state(config).params, megajax.place_batch(batch)
        jax.eval_shape(lambda params: megajax.loss(params, placed, config), params)
        by_sequence = config.model_copy(
            update={'train': config.train.changed(overlap='batch_split')}
        )
        with pytest.raises(ConfigError, match=r'batch: 6 rows .* train\.overlap=batch_split'):
            jax.eval_shape(lambda params: megajax.loss(params, placed, by_sequence), params)


def test_a_batch_that_may_be_the_rows_of_one_of_two_processes_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may also be a smaller batch, which both have passed."""
    config = config_of({'data': 2}, {}, 'none')
    with on_mesh(config):
        half = megajax.place_batch({name: x[:4] for name, x in batch_of(config).items()})
        params = abstract_state(config).params
        for processes in (1, 2):
            monkeypatch.setattr(jax, 'process_count', lambda processes=processes: processes)
            assert not [x for x in caplog.records if x.levelno >= logging.WARNING]
            jax.eval_shape(lambda params: megajax.loss(params, half, config), params)
    assert 'batch: 4 rows in 2 processes' in caplog.text


def test_a_batch_may_be_shorter_than_the_images_that_the_config_allows() -> None:
    config = megajax.load('tiny_vlm', ['mesh.data=1', 'mesh.model=1'])
    batch = {name: np.zeros((8, 16), np.int32) for name in ('tokens', 'labels', 'loss_mask')}
    with on_mesh(config):
        placed = megajax.place_batch(batch)
        params = abstract_state(config).params
        jax.eval_shape(lambda params: megajax.loss(params, placed, config), params)


def test_the_mask_has_weights_of_a_mean() -> None:
    """Also if they are fractions that add up to less than one."""
    config = config_of({}, {}, 'none', dropout=0.0)
    batch = batch_of(config)
    weights = batch['loss_mask'] * np.linspace(0.25, 1, 16, dtype=np.float32)
    with on_mesh(config):
        params = random_params(config, std=0.05)
        loss = jax.jit(lambda batch: megajax.loss(params, batch, config))
        small, large, none = (
            loss(megajax.place_batch(batch | {'loss_mask': mask}))
            for mask in (2**-10 * weights, weights, 0 * weights)
        )
    assert (small, none) == (large, 0)


def test_what_a_script_gives_in_place_of_an_argument_is_named_with_what_is_expected() -> None:
    config = config_of({}, {}, 'none')
    rows = [[1, 2], [3, 4]]
    with on_mesh(config):
        state = random_state(config)
        batch = megajax.place_batch(batch_of(config))
        for call, message in {
            (lambda: megajax.load_params('runs/mine', 'tiny')): "config: 'tiny' is not a megajax.C",
            (lambda: megajax.loss(state.params, batch, 'tiny')): "config: 'tiny' is not a megajax",
            (lambda: megajax.make_train_step('tiny')): "config: 'tiny' is not a megajax",
            (lambda: megajax.loss(state, batch, config)): 'params: a TrainState is .* its params',
            (lambda: megajax.gradients(state, batch, config)): 'params: a TrainState is not',
            (lambda: megajax.place_batch({'tokens': rows})): r"batch\['tokens'\]: a list is not an",
            (lambda: megajax.place_batch({'x': np.arange(2)})): r'a ndarray of shape \(2,\) is not',
            (lambda: megajax.place_batch([rows])): 'batch: a list is not a dict of arrays',
        }.items():
            with pytest.raises(ConfigError, match=message):
                call()


@pytest.mark.parametrize(
    ('current', 'named'),
    [
        ({}, 'no mesh is set'),
        ({'data': 1, 'model': 4}, 'the current mesh is data=1 x model=4'),
    ],
)
def test_a_mesh_that_is_not_the_configs_is_rejected_with_the_call_that_sets_it(
    current: dict[str, int], named: str
) -> None:
    config = config_of({'data': 2, 'stages': 2}, {'microbatches': 2}, 'none')
    expected = (
        f'mesh: mesh.stages=2 x mesh.data=2 x mesh.model=1, and {named}; '
        'call jax.set_mesh(megajax.make_mesh(2, 1, stage=2))'
    )
    calls: list[Callable[[], Any]] = [
        lambda: megajax.loss(None, batch_of(config), config),
        lambda: megajax.load_params('runs/mine', config),
        lambda: megajax.init_state(config),
        lambda: megajax.make_train_step(config),
        lambda: megajax.step_options(config),
        lambda: make_eval_step(config),
    ]
    with jax.set_mesh(megajax.make_mesh(**current)) if current else nullcontext():
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            assert str(caught.value) == expected
    with jax.set_mesh(megajax.make_mesh(2, 1, stage=2)):
        check_current_mesh(config)


def test_the_cross_entropy_of_sharded_logits_is_that_of_optax() -> None:
    config = config_of({'data': 2, 'model': 2}, {}, 'none')
    with on_mesh(config):
        model = nnx.merge(graph_of(config), random_params(config, std=0.05))
        batch = megajax.place_batch(batch_of(config))
        logits = jax.jit(lambda tokens: model(tokens))(batch['tokens'])
        ours = jax.jit(jax.value_and_grad(mean_of(megajax.cross_entropy)))
        loss, gradient = ours(logits, batch['labels'])
        with pytest.raises(Exception, match='out_sharding'):  # as the page says
            optax.softmax_cross_entropy_with_integer_labels(logits, batch['labels'])
    theirs = jax.jit(jax.value_and_grad(mean_of(optax.softmax_cross_entropy_with_integer_labels)))
    expected = theirs(np.asarray(logits), np.asarray(batch['labels']))
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-8)


def mean_of(losses: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda logits, labels: losses(logits, labels).mean()


@pytest.mark.parametrize('axis', ['stages', 'context'])
def test_a_model_is_not_called_where_layers_or_tokens_are_in_another_order(axis: str) -> None:
    config = config_of({axis: 2}, {'microbatches': 2}, 'none')
    with on_mesh(config):
        layout = megajax.Layout.of(config)
        batch = megajax.place_batch(batch_of(config))

        def logits(tokens: jax.Array) -> jax.Array:
            return LanguageModel(config.model, layout, key=jax.random.key(0))(tokens)

        expected = rf'mesh\.{axis}: use mesh\.{axis}=1, or megajax.loss'
        with pytest.raises(ConfigError, match=expected):
            jax.eval_shape(logits, batch['tokens'])
