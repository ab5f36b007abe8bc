"""The loss scale of fp16: Megatron's rules, gradients that do not vanish, and overflows that cost a
step and nothing else.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import CONFIG, losses, train_here
from steps import Setting, batch_of, loss_and_gradients
from support import (
    assert_close,
    gather,
    make_batch,
    make_config,
    on_mesh,
    random_params,
    random_state,
    relative_error,
    write_run,
)

from megajax.core.config import Config, NumericError
from megajax.core.train.feed import place_batch
from megajax.core.train.first_step import take_first_step
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.guard import SKIPS_IN_A_ROW, init_guard, judge, respond
from megajax.core.train.loss_scale import (
    GROWTH_STEPS,
    HYSTERESIS,
    MARGIN,
    SMALLEST,
    LossScale,
    adjust,
    init_loss_scale,
    overflows,
)
from megajax.core.train.step import TrainState, make_train_step


class MegatronsRule:
    """Of megatron-core's DynamicGradScaler, with its defaults."""

    def __init__(self, scale: float):
        self.scale, self.growth, self.hysteresis = scale, 0, 2

    def update(self, found_inf: bool) -> float:
        if found_inf:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
        else:
            self.growth += 1
            if self.growth == 1000:
                self.growth, self.hysteresis = 0, 2
                self.scale *= 2.0
        return self.scale


def scale(value: float) -> LossScale:
    return LossScale(jnp.float32(value), jnp.int32(0), jnp.int32(HYSTERESIS))


@functools.cache
def fp16() -> tuple[Config, Any]:
    """A config, and its step, which is compiled once for all tests."""
    config = make_config(
        'gpt', 2, 1, model={'dropout': 0.0}, train={'dtype': 'float16', 'nonfinite': 'stop'}
    )
    with on_mesh(config):
        return config, jax.jit(make_train_step(config))


@pytest.mark.parametrize('share', [0.0, 0.0005, 0.3])
def test_the_scale_follows_megatrons_rule(share):
    overflow_N = np.random.default_rng(1).random(3 * GROWTH_STEPS) < share
    _, actual = jax.jit(
        lambda xs: jax.lax.scan(lambda s, x: (adjust(s, x), adjust(s, x).value), scale(2.0**16), xs)
    )(overflow_N)
    rule = MegatronsRule(2.0**16)
    np.testing.assert_array_equal(actual, [rule.update(overflow) for overflow in overflow_N])


def test_it_does_not_fall_below_one_and_begins_where_a_logits_gradient_is_finite():
    low = scale(2.0)
    for _ in range(5):
        low = adjust(low, jnp.array(True))
    assert low.value == SMALLEST
    assert init_loss_scale(make_config(train={'dtype': 'float16'})).value == 2.0**15 * 256
    large = make_config(train={'dtype': 'float16', 'batch_size': 2**14, 'microbatches': 2**13})
    assert init_loss_scale(large).value == 2.0**32
    assert init_loss_scale(make_config()) is None


def test_gradients_are_those_of_fp32_however_small_they_are():
    setting = Setting('llama', 2, 2, dtype='float16')
    expected_loss, expected = loss_and_gradients(setting.on_one_device._replace(dtype='float32'))
    found = []
    with on_mesh(setting.config):
        params, batch = random_params(setting.config, std=0.05), batch_of(setting)
        function = jax.jit(make_loss_and_gradients(setting.config))
        for value in (2.0**12, 1.0):
            (loss, _), made = function(params, batch, jax.random.key(0), scale(value))
            assert relative_error(loss, expected_loss) <= 1e-2
            found.append(gather(made))
    scaled, unscaled = found
    assert_close(scaled, expected, 1e-2)
    worst = max(relative_error(unscaled[name], x) for name, x in expected.items())
    assert worst > 3e-2  # what the scale is for


def test_an_overflow_changes_nothing_but_the_scale_and_does_not_end_the_run():
    config, step = fp16()
    with on_mesh(config):
        batch = place_batch(make_batch(config))
        state = start = random_state(config)._replace(loss_scale=scale(2.0**30))
        scales = []
        for _ in range(SKIPS_IN_A_ROW + 2):
            state, metrics = step(state, batch)
            values = {name: float(value) for name, value in metrics.items()}
            scales.append(values['loss_scale'])
            assert (values['taken'], values['overflow'], values['skipped_in_a_row']) == (0, 1, 0)
            assert respond(config, 1, values) == 'go on'
        assert scales == [2.0**30, 2.0**30, 2.0**29, 2.0**28, 2.0**27]
        for old, new in zip(
            *(jax.tree.leaves((s.params, s.opt_state)) for s in (start, state)), strict=True
        ):
            np.testing.assert_array_equal(new, old)
        while not metrics['taken']:
            state, metrics = step(state, batch)
        assert metrics['loss_scale'] > 2.0**15


def test_gradients_that_are_not_finite_at_the_smallest_scale_end_the_run_as_without_one():
    loss, infinite = jnp.float32(3.0), jnp.float32(jnp.inf)
    assert overflows(scale(2 * SMALLEST), loss, infinite)
    assert not overflows(scale(SMALLEST), loss, infinite)
    assert not overflows(scale(2 * SMALLEST), loss, loss)
    guard, config = init_guard(), make_config(train={'dtype': 'float16'})
    for count in range(1, SKIPS_IN_A_ROW + 1):
        verdict, guard = judge(
            guard,
            loss,
            loss,
            infinite,
            overflow=overflows(scale(SMALLEST), loss, infinite),
            spikes=False,
        )
        values = {'loss': 3.0, 'nll': 3.0, 'grad_norm': np.inf} | {
            name: float(value) for name, value in verdict._asdict().items()
        }
        assert values['skipped_in_a_row'] == count
        if count < SKIPS_IN_A_ROW:
            assert respond(config, count, values) == 'go on'
    with pytest.raises(NumericError):
        respond(config, SKIPS_IN_A_ROW, values)


def test_the_first_step_is_taken_at_the_largest_scale_that_holds_and_later_ones_below_it():
    config, step = fp16()
    with on_mesh(config):
        batches = [place_batch(make_batch(config, seed=seed)) for seed in range(8)]

        def at(value: float) -> TrainState:
            return random_state(config)._replace(loss_scale=scale(value))

        state, metrics = take_first_step(step, at(2.0**32), batches[0])
        held = float(metrics['loss_scale'])
        assert (metrics['taken'], state.step, state.batches, state.guard.taken) == (1, 1, 1, 1)
        assert (state.loss_scale.value, state.loss_scale.overflows_left) == (
            held / MARGIN,
            HYSTERESIS,
        )
        assert step(at(2 * held), batches[0])[1]['overflow']
        straight, other = step(
            at(held), batches[0]
        )  # nothing but the scale tells that there were others before
        assert other['loss'] == metrics['loss']
        for a, b in zip(
            *(jax.tree.leaves(s._replace(loss_scale=None)) for s in (state, straight)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        for batch in batches[1:]:
            state, metrics = step(state, batch)
            assert metrics['taken']


def test_a_scale_that_the_config_gives_is_the_first():
    assert (
        init_loss_scale(make_config(train={'dtype': 'float16', 'loss_scale': 4096})).value == 4096
    )


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    config = make_config(train={'dtype': 'float16', 'nonfinite': 'stop'})
    bad = make_batch(config)
    bad['loss_mask'][0, 0] = np.nan
    with on_mesh(config):
        state, metrics = take_first_step(
            make_train_step(config), random_state(config), place_batch(bad)
        )
    values = {name: float(value) for name, value in metrics.items()}
    assert (values['taken'], values['overflow'], values['skipped_in_a_row']) == (0, 0, 1)
    assert (state.step, state.loss_scale.value) == (1, init_loss_scale(config).value)
    with pytest.raises(NumericError):
        respond(config, 1, values)


@pytest.mark.faults
def test_a_run_in_fp16_finds_its_scale_and_skips_no_batch_for_it(tmp_path: Path) -> None:
    write_run(tmp_path, CONFIG, split='1,0,0')
    fp16 = ['train.dtype=float16', 'optim.schedule=constant']
    said = train_here(tmp_path, *fp16, 'train.steps=6')
    assert 'loss scale the gradients of the first batch' in said
    assert 'skipped' not in said
    assert sorted(losses(tmp_path / 'run')) == [1, 2, 3, 4, 5, 6]
    resumed = train_here(tmp_path, *fp16, 'train.steps=7', 'train.loss_scale=1024')
    assert 'train.loss_scale: auto -> 1024.0, without effect: this run has begun' in resumed
    assert 'loss scale the gradients' not in resumed
    given = train_here(
        tmp_path, *fp16, 'train.steps=6', 'train.loss_scale=4294967296', name='given'
    )
    assert (
        'step 1 is skipped: in fp16 its gradients overflow at a loss scale of 4,294,967,296; '
        '1 so far'
    ) in given
    assert 'skipped    6 of 6 steps: 6 for gradients that overflow in fp16' in given
