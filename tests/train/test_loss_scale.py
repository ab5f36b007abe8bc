"""The loss scale of fp16: Megatron's rules, gradients that do not vanish, and overflows that cost a step and nothing else."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_close, gather, make_batch, make_config, on_mesh, random_params, relative_error

from megajax.config import NumericError
from megajax.train.feed import place_batch
from megajax.train.guard import SKIPS_IN_A_ROW, init_guard, judge, respond
from megajax.train.loss_scale import HYSTERESIS, LARGEST, SMALLEST, WINDOW, LossScale, adjust, init_loss_scale, overflows
from megajax.train.step import TrainState, init_state, make_loss_and_gradients, make_train_step


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


@pytest.mark.parametrize('share', [0.0, 0.0005, 0.3])
def test_the_scale_follows_megatrons_rule(share):
    overflow_N = np.random.default_rng(1).random(3 * WINDOW) < share
    _, actual = jax.jit(lambda xs: jax.lax.scan(lambda s, x: (adjust(s, x), adjust(s, x).value), scale(2.0**16), xs))(overflow_N)
    rule = MegatronsRule(2.0**16)
    np.testing.assert_array_equal(actual, [rule.update(overflow) for overflow in overflow_N])


def test_it_does_not_fall_below_one_and_begins_where_a_logits_gradient_is_finite():
    low = scale(2.0)
    for _ in range(5):
        low = adjust(low, jnp.array(True))
    assert low.value == SMALLEST
    assert init_loss_scale(make_config(train={'dtype': 'float16'})).value == 2.0**15 * 256
    large = make_config(train={'dtype': 'float16', 'batch_size': 2**14, 'microbatches': 2**13})
    assert init_loss_scale(large).value == LARGEST
    assert init_loss_scale(make_config()) is None


def test_gradients_are_those_of_fp32_however_small_they_are():
    gradients: dict[Any, dict[str, np.ndarray]] = {}
    for dtype, start in (('float32', None), ('float16', scale(2.0**12)), ('float16', scale(1.0))):
        config = make_config('llama', 2, 2, train={'dtype': dtype})
        with on_mesh(config):
            params, batch = random_params(config, std=0.05), place_batch(make_batch(config))
            (loss, _), made = jax.jit(make_loss_and_gradients(config))(params, batch, jax.random.key(0), start)
            gradients[dtype, start is not None and float(start.value)] = {'loss': np.asarray(loss), **gather(made)}
    expected, scaled, unscaled = gradients.values()
    assert_close(scaled, expected, 1e-2)
    worst = max(relative_error(unscaled[name], x) for name, x in expected.items())
    assert worst > 3e-2  # what the scale is for


def test_an_overflow_changes_nothing_but_the_scale_and_does_not_end_the_run():
    config = make_config('gpt', 2, 1, train={'dtype': 'float16', 'nonfinite': 'stop'})
    with on_mesh(config):
        step, batch = jax.jit(make_train_step(config)), place_batch(make_batch(config))
        state = start = init_state(config)._replace(loss_scale=scale(2.0**30))
        scales = []
        for _ in range(SKIPS_IN_A_ROW + 2):
            state, metrics = step(state, batch)
            values = {name: float(value) for name, value in metrics.items()}
            scales.append(values['loss_scale'])
            assert (values['taken'], values['overflow'], values['skipped_in_a_row']) == (0, 1, 0)
            assert respond(config, 1, values) == 'go on'
        assert scales == [2.0**30, 2.0**30, 2.0**29, 2.0**28, 2.0**27]
        for old, new in zip(*(jax.tree.leaves((s.params, s.opt_state)) for s in (start, state)), strict=True):
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
        verdict, guard = judge(guard, loss, infinite, overflow=overflows(scale(SMALLEST), loss, infinite), spikes=False)
        values = {'loss': 3.0, 'grad_norm': np.inf} | {name: float(value) for name, value in verdict._asdict().items()}
        assert values['skipped_in_a_row'] == count
        if count < SKIPS_IN_A_ROW:
            assert respond(config, count, values) == 'go on'
    with pytest.raises(NumericError):
        respond(config, SKIPS_IN_A_ROW, values)


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale():
    config = make_config(train={'dtype': 'float16', 'nonfinite': 'stop'})
    bad = make_batch(config)
    bad['loss_mask'][0, 0] = np.nan
    with on_mesh(config):
        state, metrics = make_train_step(config)(init_state(config), place_batch(bad))
    values = {name: float(value) for name, value in metrics.items()}
    assert (values['taken'], values['overflow'], values['skipped_in_a_row']) == (0, 0, 1)
    assert isinstance(state, TrainState)
    with pytest.raises(NumericError):
        respond(config, 1, values)
