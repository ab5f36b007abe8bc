"""Frozen parts of a model that sees get no gradient, and cost neither moments nor collectives."""

import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from checkpoints import make_state
from jax.stages import Compiled
from support import (
    assert_close,
    by_name,
    exhaustive,
    gather,
    make_batch,
    on_mesh,
    random_params,
    random_state,
    slow,
)
from vlm import SP, vlm

from megajax.analysis.plan.memory import memory
from megajax.core.config import Config, ConfigError, load
from megajax.core.counts.parameters import parameters
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state, make_train_step
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import parameter_shapes
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text

PARTS = {'encoder', 'merger', 'decoder'}
FREEZES = [('encoder', 'merger'), ('merger',), ('decoder',), ('encoder',), ('encoder', 'decoder')]


def part_of(name: str) -> str:
    module, *rest = name.split('.')
    if module in ('cross', 'relevance'):
        return module
    if module != 'vision':
        return 'decoder'
    return 'merger' if rest[0] in ('merger', 'deep_mergers') else 'encoder'


@functools.cache
def compiled(config: Config) -> tuple[Compiled, tuple[Any, ...]]:
    """The loss and the gradients, compiled, and what to call them with."""
    with on_mesh(config):
        # Where gates are near zero, the gradients behind them would be lost in rounding.
        params = random_params(config, std=0.3 if config.vision.is_crossed else 0.05)
        given = params, place_batch(make_batch(config)), jax.random.key(0)
        return jax.jit(make_loss_and_gradients(config)).lower(*given).compile(), given


@functools.cache
def gradients(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    function, given = compiled(config)
    (loss, _), found = function(*given)
    return float(loss), gather(found)


@pytest.mark.parametrize('freeze', [FREEZES[0], *map(exhaustive, FREEZES[1:])])
@pytest.mark.parametrize(
    'sections',
    [
        {},
        exhaustive({'train': {'dtype': 'bfloat16'}}),
        exhaustive(
            {'optim': {'shard': 'weights'}, 'train': {'recompute': 'full', 'microbatches': 2}}
        ),
    ],
)
def test_the_other_parts_have_the_gradients_of_the_run_that_freezes_nothing(
    freeze: tuple[str, ...], sections: dict[str, dict[str, object]]
) -> None:
    loss, found = gradients(vlm(2, 2, **SP, vision={'freeze': freeze}, **sections))
    expected_loss, expected = gradients(vlm(2, 2, **SP, **sections))
    assert loss == expected_loss
    learned = {name: x for name, x in expected.items() if part_of(name) not in freeze}
    assert_close(found, learned, 1e-6 if 'dtype' not in sections.get('train', {}) else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    'sections',
    [
        {'optim': {'shard': 'optimizer'}, 'train': {'dtype': 'bfloat16'}},
        exhaustive({'optim': {'shard': 'none'}}),
        exhaustive(
            {'optim': {'shard': 'gradients'}, 'train': {'dtype': 'bfloat16', 'microbatches': 2}}
        ),
        exhaustive({'optim': {'shard': 'weights'}, 'train': {'recompute': 'full'}}),
        exhaustive({'optim': {'shard': 'weights', 'moments_dtype': 'bfloat16'}}),
    ],
)
@pytest.mark.parametrize('freeze', [('encoder', 'merger'), exhaustive(('decoder',))])
def test_a_step_changes_only_what_is_not_frozen_and_keeps_no_moments_of_the_rest(
    freeze: tuple[str, ...], sections: dict[str, dict[str, object]]
) -> None:
    config = vlm(2, 2, **SP, vision={'freeze': freeze}, **sections)
    with on_mesh(config):
        state = random_state(config)
        before = gather(state.params)
        for moment in ('mu', 'nu'):
            names = by_name(optax.tree_utils.tree_get(state.opt_state, moment))
            assert {part_of(name) for name in names} == PARTS - set(freeze)
        state, metrics = make_train_step(config)(state, place_batch(make_batch(config)))
        after = gather(state.params)
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert np.array_equal(after[name], x) == (part_of(name) in freeze), name
    assert float(metrics['grad_norm']) > 0


@pytest.mark.slow
def test_the_gradient_norm_is_of_what_is_learned() -> None:
    config = vlm(vision={'freeze': ('decoder',)})
    _, found = gradients(config)
    with on_mesh(config):
        state = random_state(config)
        _, metrics = make_train_step(config)(state, place_batch(make_batch(config)))
    norm = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in found.values()))
    np.testing.assert_allclose(float(metrics['grad_norm']), norm, rtol=1e-5)


def text_of(config: Config) -> str:
    return program_text(compiled(config)[0])


def test_a_frozen_encoder_has_no_backward_pass_and_sends_no_gradients() -> None:
    def of_vectors(text: str) -> set[tuple[str, str]]:
        found = collectives(Program(text), {'data': 2, 'model': 2})
        shapes = {(1, 32, 2, 64), (1, 64, 2, 64)}  # vectors of two taps, in parts and whole
        return {(one.kind, one.axis) for one in found if one.operand.shape in shapes}

    def backward(text: str) -> set[str]:
        names = set(re.findall(r'op_name="([^"]*)"', text))
        return {name for name in names if re.search(r'transpose\(.*jvp\(vision\)', name)}

    def summed_over_both(text: str) -> list[str]:
        found = collectives(Program(text), {'data': 2, 'model': 2})
        return [str(one) for one in found if one.axis == 'data+model' and one.operand.shape]

    learned = text_of(vlm(2, 2, **SP))
    frozen = text_of(vlm(2, 2, **SP, vision={'freeze': ('encoder', 'merger')}))
    assert of_vectors(learned) == {('all-gather', 'model'), ('reduce-scatter', 'model')}
    assert of_vectors(frozen) == {('all-gather', 'model')}
    assert backward(learned)
    assert not backward(frozen)
    # Only gradients of the encoder are summed over both axes.
    assert summed_over_both(learned)
    assert not summed_over_both(frozen)


@pytest.mark.parametrize('freeze', [(), *FREEZES])
@pytest.mark.parametrize('shard', ['none', slow('weights')])
def test_the_state_is_counted_with_moments_of_what_is_learned(
    freeze: tuple[str, ...], shard: str
) -> None:
    config = vlm(2, 2, vision={'freeze': freeze}, optim={'shard': shard})
    with on_mesh(config):
        state = jax.eval_shape(lambda: init_state(config))
    sizes = memory(config)
    found = [
        sum(
            4 * math.prod(x.sharding.shard_shape(x.shape))
            for x in jax.tree.leaves(tree)
            if x.ndim or x.dtype == np.float32
        )
        for tree in (state.params, state.opt_state)
    ]
    assert [sizes.parameters, sizes.optimizer] == found


def test_adapters_are_all_that_a_model_with_images_and_lora_learns() -> None:
    config = vlm(2, 2, **SP, lora={'rank': 4}, train={'dtype': 'bfloat16'})
    learned = [name for name, x in parameters(config.model) if not x.is_frozen]
    assert learned
    assert all('.adapter.' in name for name in learned)
    with on_mesh(config):
        state = jax.eval_shape(lambda: init_state(config))
    assert {*by_name(optax.tree_utils.tree_get(state.opt_state, 'mu'))} == {*learned}
    assert memory(config).parameters == sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(state.params)
    )


@pytest.mark.slow
def test_lora_has_no_backward_pass_of_the_encoder() -> None:
    text = text_of(vlm(2, 2, **SP, lora={'rank': 4}))
    assert not re.search(r'transpose\([^"]*jvp\(vision\)', text)


@pytest.mark.slow
@pytest.mark.parametrize('sections', [{}, exhaustive({'optim': {'shard': 'weights'}})])
def test_layers_of_cross_attention_learn_beside_what_is_frozen(
    sections: dict[str, dict[str, object]],
) -> None:
    every = tuple(sorted(PARTS))
    loss, found = gradients(vlm(2, 2, **SP, crossed=True, vision={'freeze': every}, **sections))
    expected_loss, expected = gradients(vlm(2, 2, **SP, crossed=True))
    assert loss == pytest.approx(expected_loss, rel=1e-6)  # another program: an ulp
    # With gates this large an ulp of the parameters moves these gradients by 6e-6.
    assert_close(found, {n: x for n, x in expected.items() if part_of(n) == 'cross'}, 1e-5)


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match='leaves nothing to train; remove one of them'):
        load('tiny_vlm', ['vision.freeze=[encoder,merger,decoder]'])
    assert load('tiny_vlm', ['vision.freeze=[encoder]']).vision.freeze == ('encoder',)


def test_a_resumed_run_freezes_the_same_parts_and_an_import_any(tmp_path: Path) -> None:
    old, new = vlm(), vlm(vision={'freeze': ('decoder',)})
    with on_mesh(old):
        with Checkpoints(tmp_path / 'run/checkpoints', old) as checkpoints:
            checkpoints.save(make_state(old, 1), 1)
        with Checkpoints(tmp_path / 'import/checkpoints', old) as checkpoints:
            checkpoints.save({'params': make_state(old, 1).params}, 0)
        with Checkpoints(tmp_path / 'run/checkpoints', new) as checkpoints:
            checkpoints.newest_verified()
            with pytest.raises(ConfigError) as found:
                checkpoints.restore(1)
        with Checkpoints(tmp_path / 'import/checkpoints', new) as checkpoints:
            checkpoints.newest_verified()
            moments = by_name(optax.tree_utils.tree_get(checkpoints.restore(0).opt_state, 'mu'))
    message = str(found.value)
    assert "vision.freeze [] there, ['decoder'] here" in message
    assert message.endswith(f'begin a new run with run.start_from={tmp_path / "run"}')
    assert {part_of(name) for name in moments} == {'encoder', 'merger'}


@pytest.mark.slow
@pytest.mark.parametrize('shard', [exhaustive('optimizer'), 'weights'])
def test_a_checkpoint_holds_all_weights_and_resumes_to_the_bit(tmp_path: Path, shard: str) -> None:
    config = vlm(2, 2, vision={'freeze': ('encoder', 'merger')}, optim={'shard': shard})
    with on_mesh(config):
        step, batch = make_train_step(config), place_batch(make_batch(config))
        state, _ = step(init_state(config), batch)
        with Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
            checkpoints.save(state, 1)
        straight, _ = step(state, batch)
        with Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
            checkpoints.newest_verified()
            resumed, _ = step(checkpoints.restore(1), batch)
        for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(resumed), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    parameters = set(parameter_shapes(tmp_path / 'checkpoints/1'))
    assert {part_of(name) for name in parameters} == PARTS
