"""A mixture of experts has the same numbers on every mesh, whoever holds the experts."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from steps import Setting, loss_and_gradients, train
from support import (
    abstract_state,
    assert_close,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_state,
    relative_error,
    slow,
)
from vlm import vlm

from megajax.core.config import Config
from megajax.core.model.router import CHOSEN, DROPPED, ENTROPY, STATISTICS
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.routing import after_step, init_load, metrics
from megajax.core.train.step import make_train_step

LIMIT = 1e-5

# Experts on all or some of the data shards; with tensor and sequence parallelism, all ZeRO stages,
# replicas, microbatches, recomputation, stages and context shards.
SETTINGS = [
    exhaustive(
        Setting('experts', 4, 2, 'weights', experts=2, sequence_parallel=True, microbatches=2)
    ),
    exhaustive(Setting('experts', 2, 1, 'none', experts=2)),
    exhaustive(Setting('experts', 1, 2)),
    exhaustive(Setting('experts', 4, 2, 'optimizer', experts=4, recompute='full')),
    exhaustive(Setting('experts', 4, 2, 'gradients', experts=2, sequence_parallel=True)),
    exhaustive(Setting('experts', 8, 1, 'weights', 2, experts=2, recompute='full')),
    exhaustive(Setting('experts', 8, 1, 'optimizer', 2, experts=4, microbatches=2)),
    exhaustive(Setting('experts', 8, 1, 'weights', experts=8)),
    exhaustive(Setting('experts', 8, 1, 'weights', experts=2, hidden_size=60)),
    slow(Setting('experts', 2, 2, 'optimizer', experts=2, context=2, plain=True)),
    exhaustive(Setting('experts', 4, 1, 'weights', experts=2, context=2, plain=True)),
    exhaustive(Setting('experts', 2, 2, 'optimizer', experts=2, stages=2, microbatches=2)),
    exhaustive(
        Setting(
            'experts',
            2,
            2,
            experts=2,
            stages=2,
            virtual_stages=2,
            microbatches=2,
            sequence_parallel=True,
            recompute='full',
            num_layers=4,
        )
    ),
    exhaustive(
        Setting('first_dense', 2, 2, 'weights', experts=2, sequence_parallel=True, num_layers=3)
    ),
    exhaustive(Setting('first_dense', 4, 1, experts=2, recompute='full', num_layers=3)),
    slow(Setting('half_dense', 2, 2, experts=2, stages=2, microbatches=2, num_layers=4)),
    exhaustive(Setting('half_dense', 4, 2, 'optimizer', experts=4, recompute='full', num_layers=5)),
    exhaustive(
        Setting(
            'half_dense',
            **{'data': 2, 'model': 2, 'experts': 2, 'stages': 2, 'virtual_stages': 2},
            **{'microbatches': 2, 'recompute': 'full', 'num_layers': 8},
        )
    ),
    exhaustive(Setting('first_dense', 2, 2, experts=2, context=2, plain=True, num_layers=3)),
    Setting('capacity', 4, 2, 'weights', experts=2, sequence_parallel=True, microbatches=2),
    exhaustive(Setting('capacity', 4, 2, 'optimizer', experts=4, sequence_parallel=True)),
    slow(Setting('experts', 4, 2, 'weights', experts=2, overlap='batch_split', recompute='full')),
    exhaustive(
        Setting(
            *('capacity', 4, 2, 'optimizer'),
            **{'experts': 2, 'overlap': 'batch_split', 'microbatches': 2, 'rows': 32},
        )
    ),
    exhaustive(
        Setting(
            *('experts', 2, 1),
            **{'experts': 2, 'stages': 2, 'microbatches': 2, 'overlap': 'batch_split'},
        )
    ),
    exhaustive(Setting('half_dense', 4, 2, experts=2, recompute='full', num_layers=5, unroll=True)),
    exhaustive(Setting('bert_experts', 2, 2, 'weights', experts=2, sequence_parallel=True)),
    exhaustive(Setting('bert_experts', 2, 2, experts=2, stages=2, microbatches=2)),
    exhaustive(Setting('capacity', 2, 2, experts=2, context=2, plain=True)),
    exhaustive(Setting('capacity', 2, 2, experts=2, stages=2, microbatches=2)),
]


@pytest.mark.parametrize('setting', SETTINGS, ids=str)
def test_loss_and_gradients_are_those_of_one_device(setting: Setting) -> None:
    alone = setting.on_one_device._replace(microbatches=1, overlap='none', unroll=False)
    expected_loss, expected = loss_and_gradients(alone)
    loss, gradients = loss_and_gradients(setting)
    assert relative_error(loss, expected_loss) <= 1e-6
    assert_close(gradients, expected, LIMIT)


@pytest.mark.parametrize(
    'setting',
    [
        slow(Setting('capacity', 4, 2, 'optimizer', experts=2)),
        exhaustive(Setting('experts', 4, 2, 'weights', experts=4)),
    ],
    ids=str,
)
def test_training_and_evaluation_are_those_of_one_device(setting: Setting) -> None:
    expected, actual = train(setting.on_one_device), train(setting)
    assert relative_error(actual.losses, expected.losses) <= LIMIT
    assert_close(actual.params, expected.params, LIMIT)
    assert_close(actual.evaluated, expected.evaluated, LIMIT)


def test_an_evaluation_is_the_program_of_a_model_that_drops_no_token() -> None:
    config = Setting('capacity', 1, 1).config
    experts = config.model.experts
    assert experts is not None
    dropless = experts.model_copy(update={'capacity': None})
    model = config.model.model_copy(update={'experts': dropless})
    with on_mesh(config):
        given = abstract_state(config).params, place_batch(make_batch(config))
        with_capacity, without = (
            make_eval_step(each).lower(*given).as_text()
            for each in (config, config.model_copy(update={'model': model}))
        )
    assert with_capacity == without


class Taken(NamedTuple):
    """What a step changes and reports."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    load: np.ndarray
    metrics: dict[str, float]


@functools.cache
def taken(over: str, length: int) -> Taken:
    """A step of rows of 16 tokens, of which the last ones are padding, with more up to `length`."""
    balanced = {'balance_loss': 0.1, 'balance_over': over, 'z_loss': 0.01, 'selection_bias': True}
    capacity = {'capacity': 1.0, 'capacity_group': 4}
    experts = {'count': 8, 'active': 2, 'ffn_size': 32, **balanced, **capacity}
    config = make_config(
        'llama', model={'experts': experts, 'num_layers': 1}, train={'seq_len': length}
    )
    short = make_batch(make_config('llama', train={'seq_len': 16}))
    short['loss_mask'] = short['loss_mask'] * (np.arange(16) < 8 + np.arange(8)[:, None])
    batch = {name: np.pad(x, [(0, 0), (0, length - 16)]) for name, x in short.items()}
    with on_mesh(config):
        state = random_state(config)
        before = gather(state.params)
        state, metrics = make_train_step(config)(state, place_batch(batch))
        reported = {name: float(x) for name, x in metrics.items()}
        return Taken(before, gather(state.params), np.asarray(state.load), reported)


@pytest.mark.parametrize('over', [slow('batch'), slow('sequence')])
def test_padding_moves_no_router(over: str) -> None:
    """Rows of 24 tokens, of which the last 8 to 15 are padding, are those of 16 tokens."""
    found = {}
    for length in (16, 24):
        step = taken(over, length)
        found[length] = step.after | {'load': step.load}
        found[length] |= {name: np.array(step.metrics[name]) for name in ('router_entropy',)}
        # the load of this step, which is not the equal load of the first one
        assert 8 * step.load.max() == pytest.approx(step.metrics['expert_load'])
        assert step.metrics['expert_load'] > 1.1
    assert_close(found[24], found[16], LIMIT)


def test_the_selection_bias_moves_towards_experts_with_few_tokens() -> None:
    name, step = 'layers.experts.router.selection_bias', taken('batch', 16)
    moved = (step.after[name] - step.before[name]) / 1e-3
    np.testing.assert_allclose(moved, np.sign(1 / 8 - step.load), atol=0.01)
    assert moved.min() < 0 < moved.max()
    assert step.metrics['dropped'] > 0


def test_without_a_counted_token_the_load_stays() -> None:
    config = Setting('experts', 1, 1).config
    assert config.model.experts is not None
    load = init_load(config)
    none = jnp.zeros((len(load), len(STATISTICS), config.model.experts.count))
    after = jax.jit(lambda load: after_step({}, load, none, jnp.array(True), config)[1])
    np.testing.assert_array_equal(after(load), load)
    assert all(np.isfinite(x) for x in metrics(none, config).values())


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_the_load_and_the_selection_bias() -> None:
    setting = Setting('capacity', 1, 1)
    bad = make_batch(setting.config)
    bad['loss_mask'][-1, 3] = np.nan
    with on_mesh(setting.config):
        state = random_state(setting.config)
        step = jax.jit(make_train_step(setting.config), donate_argnums=())
        after, metrics = step(state, place_batch(bad))
        assert not metrics['taken']
        before, after = ((each.params, each.opt_state, each.load) for each in (state, after))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(old, new)


FROZEN = {
    'adapters': make_config('capacity', lora={'rank': 4, 'targets': ['qkv', 'out']}),
    'decoder': vlm(
        vision={'freeze': ('decoder',)},
        model={'experts': {'count': 8, 'active': 2, 'ffn_size': 32, 'selection_bias': True}},
    ),
}


@pytest.mark.parametrize('config', FROZEN.values(), ids=FROZEN)
def test_the_selection_bias_of_a_frozen_decoder_stays(config: Config) -> None:
    with on_mesh(config):
        params, load = nnx.State({}), init_load(config)
        sums = jnp.ones((config.model.num_layers, len(STATISTICS), 8)).at[:, :, 0].set(2)
        after, shares = after_step(params, load, sums, jnp.array(True), config)
    assert after is params
    np.testing.assert_allclose(shares[:, 0], 2 / 9)


def test_only_a_balance_loss_over_the_batch_is_reported() -> None:
    experts = {'count': 8, 'active': 2, 'ffn_size': 32, 'balance_loss': 0.5}
    # equal loads, and scores that add up to 1 for each of the 256 tokens
    sums = jnp.zeros((2, len(STATISTICS), 8)).at[:, 0].set(64).at[:, 1].set(32)
    for over, reported in (('batch', 0.5 * 2), ('sequence', None)):
        config = make_config('llama', model={'experts': experts | {'balance_over': over}})
        assert metrics(sums, config).get('balance_loss') == reported


def test_the_reported_load_entropy_and_drops_are_of_all_layers() -> None:
    capacity = {'capacity': 1.0, 'capacity_group': 4}
    experts = {'count': 4, 'active': 2, 'ffn_size': 32, 'balance_loss': 0.0} | capacity
    sums = np.full((2, len(STATISTICS), 4), 9.0)  # of 4 tokens in each layer
    sums[:, CHOSEN] = [6, 2, 0, 0], [2, 2, 2, 2]
    sums[:, ENTROPY] = [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5]
    sums[:, DROPPED] = [2, 0, 0, 0], [0, 0, 0, 0]
    found = metrics(jnp.asarray(sums), make_config('llama', model={'experts': experts}))
    assert {name: float(x) for name, x in found.items()} == {
        'expert_load': 3,
        'router_entropy': 0.75,
        'idle_experts': 2,
        'dropped': 1 / 8,
    }
