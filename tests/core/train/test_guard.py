"""A step whose numbers are not finite, or whose loss is a spike, changes nothing, and the run goes
on, back or ends as the config says.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import CLIPPED, step_of
from support import exhaustive, make_batch, make_config, on_mesh, random_state

from megajax.core.config import Config, NumericError
from megajax.core.train.feed import place_batch
from megajax.core.train.guard import SKIPS_IN_A_ROW, USUAL_STEPS, init_guard, judge, respond
from megajax.core.train.optimizer import learning_rate


def config(data: int = 1, model: int = 1, **train: Any) -> Config:
    optim = {'warmup_steps': 4}
    return make_config('gpt', data, model, model={'dropout': 0.0}, train=train, optim=optim)


def leaves(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves((state.params, state.opt_state))]


@pytest.mark.parametrize('value', [np.nan, np.inf, exhaustive(-np.inf)])
@pytest.mark.parametrize(
    'config', [CLIPPED, exhaustive(config()), exhaustive(config(4, 1))], ids=['2x2', '1x1', '4x1']
)
def test_one_bad_number_on_one_shard_leaves_every_parameter_as_it_is(
    config: Config, value: float
) -> None:
    with on_mesh(config):
        state, good = random_state(config), make_batch(config)
        before = leaves(state)
        bad = good | {'loss_mask': good['loss_mask'].copy()}
        bad['loss_mask'][-1, 3] = value
        state, metrics = step_of(config)(state, place_batch(bad))
        assert not metrics['taken']
        assert not metrics['finite']
        assert (int(state.step), int(state.batches), int(state.guard.skipped_in_a_row)) == (1, 1, 1)
        for old, new in zip(before, leaves(state), strict=True):
            np.testing.assert_array_equal(old, new)
        state, metrics = step_of(config)(state, place_batch(good))
        assert metrics['taken']
        # the rate of the update: the schedule does not advance in a skipped step
        assert metrics['lr'] == pytest.approx(learning_rate(config)(0))
        assert metrics['lr'] != pytest.approx(learning_rate(config)(1))
        assert int(state.guard.skipped_in_a_row) == 0
        assert any((old != new).any() for old, new in zip(before, leaves(state), strict=True))


def test_a_batch_without_a_token_that_counts_has_no_loss_and_no_gradient_and_is_no_fault() -> None:
    with on_mesh(CLIPPED):
        state, batch = random_state(CLIPPED), make_batch(CLIPPED)
        none = batch | {'loss_mask': np.zeros_like(batch['loss_mask'])}
        _, metrics = step_of(CLIPPED)(state, place_batch(none))
    assert (metrics['loss'], metrics['nll'], metrics['grad_norm']) == (0, 0, 0)
    assert metrics['finite']
    assert metrics['taken']


@functools.partial(jax.jit, static_argnames='spikes')
def judged(
    guard: Any, loss: float, grad_norm: float, nll: float | None = None, *, spikes: bool
) -> Any:
    return judge(
        guard,
        jnp.float32(loss),
        jnp.float32(loss if nll is None else nll),
        jnp.float32(grad_norm),
        overflow=jnp.array(False),
        spikes=spikes,
    )


def usual(count: int, *, spikes: bool = True) -> Any:
    guard = init_guard()
    for i in range(count):
        verdict, guard = judged(guard, 3 + 0.1 * (-1) ** i, 1.0, spikes=spikes)
        assert verdict.taken
    return guard


def test_a_loss_far_above_the_last_ones_is_a_spike_once_there_are_enough() -> None:
    assert judged(usual(USUAL_STEPS - 1), 30.0, 1.0, spikes=True)[0].taken
    verdict, after = judged(usual(USUAL_STEPS), 30.0, 1.0, spikes=True)
    assert (bool(verdict.taken), bool(verdict.spike), bool(verdict.finite)) == (False, True, True)
    np.testing.assert_array_equal(
        after.losses, usual(USUAL_STEPS).losses
    )  # a spike is no measure of the next
    assert judged(usual(USUAL_STEPS), 3.5, 1.0, spikes=True)[0].taken
    watched, _ = judged(usual(USUAL_STEPS), 30.0, 1.0, spikes=False)
    assert (bool(watched.taken), bool(watched.spike)) == (True, True)


def test_a_spike_is_six_deviations_above_the_mean_of_the_last_losses_alone() -> None:
    guard = usual(USUAL_STEPS)
    for i in range(USUAL_STEPS):
        verdict, guard = judged(guard, 2 + 0.1 * (-1) ** i, 1.0, spikes=True)
        assert verdict.taken
    spikes = [bool(judged(guard, loss, 1.0, spikes=True)[0].spike) for loss in (2.55, 2.65)]
    assert spikes == [False, True]


@pytest.mark.parametrize(('loss', 'grad_norm'), [(np.nan, 1.0), (3.0, np.inf), (np.inf, np.nan)])
def test_numbers_that_are_not_finite_do_not_reach_the_window(loss: float, grad_norm: float) -> None:
    verdict, after = judged(usual(5), loss, grad_norm, spikes=True)
    assert (bool(verdict.taken), bool(verdict.finite), bool(verdict.spike)) == (False, False, False)
    np.testing.assert_array_equal(after.losses, usual(5).losses)


def test_a_cross_entropy_below_zero_is_not_finite() -> None:
    assert judged(usual(5), 3.0, 1.0, -1e-5, spikes=True)[0].taken  # by rounding
    verdict, after = judged(usual(5), 3.0, 1.0, -0.01, spikes=True)
    assert (bool(verdict.taken), bool(verdict.finite)) == (False, False)
    np.testing.assert_array_equal(after.losses, usual(5).losses)
    with pytest.raises(NumericError, match=r'cross entropy of -0\.01, which is never below zero'):
        respond(config(nonfinite='stop'), 4, metrics(taken=False, finite=False, nll=-0.01))


def metrics(
    *, taken: bool, finite: bool = True, in_a_row: int = 1, nll: float = 7.0
) -> dict[str, float]:
    return {
        'taken': taken,
        'finite': finite,
        'overflow': False,
        'loss': 7.0,
        'nll': nll,
        'grad_norm': 1.0,
        'skipped_in_a_row': in_a_row,
    }


def test_the_config_decides_what_follows() -> None:
    assert respond(config(nonfinite='stop'), 4, metrics(taken=True)) == 'go on'
    assert respond(config(nonfinite='skip'), 4, metrics(taken=False, finite=False)) == 'go on'
    assert (
        respond(config(nonfinite='rollback'), 4, metrics(taken=False, finite=False)) == 'roll back'
    )
    assert respond(config(spike='rollback'), 4, metrics(taken=False)) == 'roll back'
    assert respond(config(nonfinite='stop', spike='skip'), 4, metrics(taken=False)) == 'go on'
    with pytest.raises(
        NumericError,
        match=(
            r'step 4: the loss \(7, gradient norm 1\) or its gradient is not finite; '
            r'train.nonfinite=stop'
        ),
    ):
        respond(config(nonfinite='stop'), 4, metrics(taken=False, finite=False))
    with pytest.raises(NumericError, match=f'as in the {SKIPS_IN_A_ROW - 1} steps before it'):
        respond(config(), 4, metrics(taken=False, finite=False, in_a_row=SKIPS_IN_A_ROW))
