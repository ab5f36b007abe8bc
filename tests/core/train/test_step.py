"""The train step: what may not change its result, and the optimizer's arithmetic in numpy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.stages import Wrapped
from steps import CLIPPED, own_step_of, step_of
from support import (
    assert_close,
    by_name,
    exhaustive,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    random_state,
    relative_error,
    slow,
)

import megajax
from megajax.core.config import Config, OptimConfig
from megajax.core.counts.declaration import Parameter, Role
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.optimizer import decays, make_optimizer, make_schedule
from megajax.core.train.step import init_state, make_train_step

LIMIT = 1e-5  # relative, see support.relative_error


@functools.cache
def function(config: Config) -> Wrapped:
    """The loss and the gradients of a config, compiled once for all tests."""
    return jax.jit(make_loss_and_gradients(config))


def loss_and_gradients(config: Config) -> tuple[float, dict[str, np.ndarray]]:
    with on_mesh(config):
        params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
        (loss, _), gradients = function(config)(params, batch, jax.random.key(0))
        return float(loss), gather(gradients)


plain = functools.cache(lambda: loss_and_gradients(make_config()))


def assert_same_as_plain(config: Config) -> None:
    (expected, expected_gradients), (actual, gradients) = plain(), loss_and_gradients(config)
    assert config.model.dropout > 0
    assert relative_error(actual, expected) <= LIMIT
    assert_close(gradients, expected_gradients, LIMIT)


@pytest.mark.parametrize('mesh', [exhaustive((1, 1)), slow((2, 2))])
def test_four_microbatches_have_the_loss_and_gradients_of_one_with_dropout_on(mesh):
    assert_same_as_plain(make_config('gpt', *mesh, train={'microbatches': 4}))


@pytest.mark.slow
@pytest.mark.parametrize('sequence_parallel', [exhaustive(False), True], ids=['tp', 'sp'])
def test_halves_that_take_turns_change_nothing(sequence_parallel):
    assert_same_as_plain(
        make_config(
            'gpt', 2, 2, sequence_parallel=sequence_parallel, train={'overlap': 'batch_split'}
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize('recompute', ['selective', 'full'])
def test_recomputation_changes_nothing(recompute):
    assert_same_as_plain(
        make_config('gpt', 2, 2, sequence_parallel=True, train={'recompute': recompute})
    )


def test_every_step_and_every_row_has_its_own_dropout_and_no_other():
    """Also in a training loop of one's own."""
    config = make_config()
    tokens = np.tile(np.arange(32, dtype=np.int32), (8, 1))
    with on_mesh(config):
        state, step = random_state(config, std=0.3), make_train_step(config)
        loss = jax.jit(lambda state, batch: step(state, batch)[1]['loss'])

        def loss_of_row(row: int, number: int) -> float:
            only = np.repeat(np.arange(8) == row, 32).reshape(8, 32).astype(np.float32)
            batch = place_batch({'tokens': tokens, 'labels': tokens, 'loss_mask': only})
            return float(loss(state._replace(step=jnp.int32(number)), batch))

        losses = sorted(loss_of_row(row, number) for number in (0, 1) for row in range(8))
        assert loss_of_row(0, 0) == loss_of_row(0, 0)
        own = jax.jit(lambda params, batch: megajax.loss(params, batch, config, step=1))
        batch = place_batch(make_batch(config))
        expected = float(loss(state._replace(step=jnp.int32(1)), batch))
        assert float(own(state.params, batch)) == pytest.approx(expected, rel=1e-6)
    assert min(np.diff(losses)) > 1e-5


def test_a_step_reports_the_loss_norm_and_rate_that_it_used_clips_and_deletes_the_state_it_got():
    config = CLIPPED
    with on_mesh(config):
        old, batch = random_state(config), place_batch(make_batch(config))
        nll_sum = float(make_eval_step(config)(old.params, batch)['nll'])
        loss, gradients, _ = own_step_of(config)(old.params, old.opt_state, batch)
        gradients = gather(gradients)
        new, metrics = step_of(config)(old, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
        first_moment = gather(optax.tree_utils.tree_get(new.opt_state, 'mu'))
    norm = math.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in gradients.values()))
    assert norm > config.optim.grad_clip
    assert int(new.step) == 1
    assert metrics['loss'] == pytest.approx(float(loss), rel=1e-6)
    assert metrics['nll'] == pytest.approx(nll_sum / np.asarray(batch['loss_mask']).sum(), rel=1e-6)
    assert metrics['grad_norm'] == pytest.approx(norm, rel=1e-5)
    assert metrics['lr'] == pytest.approx(config.optim.lr / 5)
    assert_close(
        first_moment, {name: x * (0.1 * 0.05 / norm) for name, x in gradients.items()}, LIMIT
    )


STEPS, WARMUP, LR, LOW = 100, 10, 1e-3, 1e-4


@pytest.mark.parametrize(
    ('schedule', 'step', 'expected'),
    [
        *[
            (schedule, step, LR * (step + 1) / 11)
            for schedule in ('cosine', 'linear', 'constant', 'wsd')
            for step in (0, 4, 9)
        ],
        *[(schedule, 10, LR) for schedule in ('cosine', 'linear', 'constant', 'wsd')],
        ('cosine', 40, LOW + (LR - LOW) * (1 + math.cos(math.pi / 3)) / 2),
        ('cosine', 55, (LR + LOW) / 2),
        ('linear', 40, LR - (LR - LOW) / 3),
        ('constant', 99, LR),
        ('wsd', 81, LR),  # the last fifth of the 90 steps after the warm-up begins at 82
        ('wsd', 82, LR),
        ('wsd', 91, (LR + LOW) / 2),
        *[(schedule, step, LOW) for schedule in ('cosine', 'linear', 'wsd') for step in (100, 150)],
    ],
)
def test_learning_rate(schedule, step, expected):
    optim = OptimConfig(lr=LR, min_lr=LOW, warmup_steps=WARMUP, schedule=schedule)
    assert float(make_schedule(optim, STEPS)(step)) == pytest.approx(expected, rel=2e-5)
    longer = make_schedule(optim.model_copy(update={'decay_steps': STEPS}), 5 * STEPS)
    assert float(longer(step)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize('name', ['gpt', 'llama'])
def test_all_but_biases_and_norms_decay(name):
    config = make_config(name)
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config)).params
    decaying = {parameter for parameter, decays in by_name(decays(params)).items() if decays}
    layers = {
        f'layers.{weight}.weight'
        for weight in ('attention.qkv', 'attention.out', 'mlp.up', 'mlp.down')
    }
    assert decaying == layers | {'embedding.table', 'position.table' if name == 'gpt' else 'head'}


def adamw(optim: OptimConfig, steps: int, params: dict, gradients: list[dict], clip: float) -> dict:
    """Decoupled weight decay (Loshchilov and Hutter, 2019) after clipping by the global norm, in
    float64.
    """
    params = {name: x.astype(np.float64) for name, x in params.items()}
    first, second = ({name: np.zeros_like(x) for name, x in params.items()} for _ in range(2))
    for t, gradient in enumerate(gradients, start=1):
        norm = math.sqrt(sum(np.square(x, dtype=np.float64).sum() for x in gradient.values()))
        lr = optim.lr * t / (optim.warmup_steps + 1)
        assert t <= optim.warmup_steps < steps
        for name, x in gradient.items():
            clipped = x * min(1, clip / norm)
            first[name] = optim.beta1 * first[name] + (1 - optim.beta1) * clipped
            second[name] = optim.beta2 * second[name] + (1 - optim.beta2) * clipped**2
            update = (
                first[name]
                / (1 - optim.beta1**t)
                / (np.sqrt(second[name] / (1 - optim.beta2**t)) + optim.eps)
            )
            params[name] = params[name] - lr * (
                update + (0 if 'norm' in name else optim.weight_decay) * params[name]
            )
    return params


def declared(arrays: dict[str, np.ndarray]) -> dict[str, nnx.Param]:
    roles = {1: Role.VECTOR, 2: Role.MATRIX}
    return {
        name: nnx.Param(jnp.float32(x), declared=Parameter('DF'[: x.ndim], roles[x.ndim]))
        for name, x in arrays.items()
    }


def test_updates_are_those_of_adamw_in_numpy_with_gradients_above_the_limit_scaled_to_it():
    optim = {
        'lr': 0.1,
        'warmup_steps': 8,
        'weight_decay': 0.2,
        'beta1': 0.8,
        'beta2': 0.95,
        'grad_clip': 1.5,
        'eps': 1e-2,
    }
    config = make_config(optim=optim)
    random = np.random.default_rng(0)
    shapes = {'norm': (7,), 'up': (7, 5), 'down': (5, 7)}
    # Norms of about 0.4, 4, 0.9 and 40: Adam does not see the scale of one gradient, but the ratios
    # between several.
    gradients = [
        {name: random.normal(size=shape, scale=scale) for name, shape in shapes.items()}
        for scale in (0.05, 0.5, 0.1, 5)
    ]
    params = start = {name: random.normal(size=shape) for name, shape in shapes.items()}
    optimizer = make_optimizer(config)
    state, update = optimizer.init(declared(params)), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(declared(gradient), state, declared(params))
        params = gather(nnx.State(optax.apply_updates(declared(params), updates)))
    decaying = by_name(nnx.State(decays(declared(params))))
    assert decaying == {'norm': False, 'up': True, 'down': True}
    expected, unclipped = (
        adamw(config.optim, config.train.steps, start, gradients, clip) for clip in (1.5, math.inf)
    )
    assert_close(params, expected, 1e-6)
    assert relative_error(unclipped['up'], expected['up']) > 1e-2
