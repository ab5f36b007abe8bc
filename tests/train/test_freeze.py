"""Frozen parts of a model that sees get no gradient, and cost neither moments nor collectives."""

import functools

import jax
import numpy as np
import optax
import pytest
from support import (
    assert_close,
    by_name,
    gather,
    make_batch,
    on_mesh,
    random_params,
    slow,
)
from vlm import SP, vlm

from megajax.config import Config, ConfigError, load
from megajax.hlo.collectives import collectives
from megajax.hlo.program import Program
from megajax.hlo.text import program_text
from megajax.train.feed import place_batch
from megajax.train.gradients import make_loss_and_gradients
from megajax.train.step import init_state, make_train_step

PARTS = {'encoder', 'merger', 'decoder'}
FREEZES = [('encoder',), ('merger',), ('decoder',), ('encoder', 'merger'), ('encoder', 'decoder')]


def part_of(name: str) -> str:
    module, *rest = name.split('.')
    if module != 'vision':
        return 'decoder'
    return 'merger' if rest[0] in ('merger', 'deep_mergers') else 'encoder'


@functools.cache
def gradients(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    with on_mesh(config):
        params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
        (loss, _), found = jax.jit(make_loss_and_gradients(config))(
            params, batch, jax.random.key(0)
        )
        return float(loss), gather(found)


@pytest.mark.parametrize('freeze', FREEZES)
@pytest.mark.parametrize(
    'sections',
    [
        {},
        slow({'train': {'dtype': 'bfloat16'}}),
        slow({'optim': {'shard': 'weights'}, 'train': {'recompute': 'full', 'microbatches': 2}}),
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


@pytest.mark.parametrize(
    'sections',
    [
        {'optim': {'shard': 'optimizer'}, 'train': {'dtype': 'bfloat16'}},
        slow({'optim': {'shard': 'none'}}),
        slow({'optim': {'shard': 'gradients'}, 'train': {'dtype': 'bfloat16', 'microbatches': 2}}),
        slow({'optim': {'shard': 'weights'}, 'train': {'recompute': 'full'}}),
        slow({'optim': {'shard': 'weights', 'moments_dtype': 'bfloat16'}}),
    ],
)
@pytest.mark.parametrize('freeze', [('encoder', 'merger'), ('decoder',)])
def test_a_step_changes_only_what_is_not_frozen_and_keeps_no_moments_of_the_rest(
    freeze: tuple[str, ...], sections: dict[str, dict[str, object]]
) -> None:
    config = vlm(2, 2, **SP, vision={'freeze': freeze}, **sections)
    with on_mesh(config):
        state = init_state(config)
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


def test_the_gradient_norm_is_of_what_is_learned() -> None:
    config = vlm(vision={'freeze': ('decoder',)})
    _, found = gradients(config)
    with on_mesh(config):
        state = init_state(config, random_params(config, std=0.05))
        _, metrics = make_train_step(config)(state, place_batch(make_batch(config)))
    norm = np.sqrt(sum(np.square(x.astype(np.float64)).sum() for x in found.values()))
    np.testing.assert_allclose(float(metrics['grad_norm']), norm, rtol=1e-5)


def program(freeze: tuple[str, ...]) -> Program:
    config = vlm(2, 2, **SP, vision={'freeze': freeze})
    with on_mesh(config):
        params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
        lowered = jax.jit(make_loss_and_gradients(config)).lower(params, batch, jax.random.key(0))
        return Program(program_text(lowered.compile()))


def test_a_frozen_encoder_runs_forward_only_and_its_vectors_send_no_gradient() -> None:
    def sent(freeze: tuple[str, ...]) -> set[tuple[str, str]]:
        found = collectives(program(freeze), {'data': 2, 'model': 2})
        of_vectors = [one for one in found if one.operand.shape[-2:] == (2, 64)]
        return {(one.kind, one.axis) for one in of_vectors if len(one.operand.shape) == 4}

    def backward(freeze: tuple[str, ...]) -> bool:
        text = str(program(freeze).text)
        return 'transpose(jvp(vision))' in text or '/vision/layers' in text.split('transpose')[-1]

    assert sent(()) == {('all-gather', 'model'), ('reduce-scatter', 'model')}
    assert sent(('encoder', 'merger')) == {('all-gather', 'model')}


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match='nothing is trained; leave one out'):
        load('tiny_vlm', ['vision.freeze=[encoder,merger,decoder]'])
    assert load('tiny_vlm', ['vision.freeze=[encoder]']).vision.freeze == ('encoder',)
