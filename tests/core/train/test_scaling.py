"""A step in fp8 has scales from earlier steps, the same on every mesh and after a resume."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import equal, make_state, tiny
from steps import Setting, batch_of, evaluate, loss_and_gradients
from support import (
    abstract_state,
    assert_close,
    exhaustive,
    gather,
    in_layer_order,
    make_batch,
    on_mesh,
    random_params,
    random_state,
    relative_error,
    slow,
)

from megajax.core.config import Config
from megajax.core.model import fp8
from megajax.core.parallel.layout import Layout
from megajax.core.train import first_step
from megajax.core.train.feed import place_batch
from megajax.core.train.first_step import Calibration, with_scales
from megajax.core.train.gradients import make_gradients
from megajax.core.train.guard import USUAL_STEPS, Guard, init_guard
from megajax.core.train.scaling import (
    WINDOW,
    current,
    linears,
    nothing_seen,
    remember,
    scales_of,
)
from megajax.core.train.step import (
    Metrics,
    TrainState,
    init_state,
    make_calibration,
    make_train_step,
)
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.xla.hlo.dump import without_cache

SP = {'sequence_parallel': True}
ONE = Setting('llama', 1, 1, dtype='fp8')
# Idle stages and layers in a different order; the exponents are of the model's layers in order.
INTERLEAVED = {
    **{'dtype': 'fp8', 'stages': 2, 'virtual_stages': 2},
    **{'num_layers': 4, 'microbatches': 4},
}


@pytest.fixture(scope='module', autouse=True)
def _calibrations_of_a_config_are_compiled_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_step, 'make_calibration', functools.cache(make_calibration))
        yield


def scales_from(places: Any, config: Config) -> jax.Array:
    """The scales after a step with these places."""
    return scales_of(remember(nothing_seen(config), jnp.asarray(places)))


def compiling(setting: Setting) -> AbstractContextManager[None]:
    # A program of a 2-D grid that is read from the cache may hang: `runtime.run.compile_cache`.
    return nullcontext() if setting.config.mesh.num_devices == 1 else without_cache()


@functools.cache
def without_scales(setting: Setting) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The gradients of a step in bf16 with the batch of a setting, and the state after it."""
    with compiling(setting), on_mesh(setting.config):
        params = random_params(setting.config, std=0.05)
        given = params, batch_of(setting), jax.random.key(0)
        _, gradients, seen = jax.jit(make_gradients(setting.config))(*given)
        recent = remember(nothing_seen(setting.config), seen.places)
        return gather(gradients), np.asarray(recent)


def scales_in(setting: Setting) -> np.ndarray:
    """The scales after a step in bf16 with the batch of a setting."""
    return np.asarray(scales_of(jnp.asarray(without_scales(setting)[1])))


@functools.cache
def in_fp8(setting: Setting, nudge: int = 0) -> tuple[float, dict[str, np.ndarray], np.ndarray]:
    """The loss, the gradients and the places of a step, with one device's scales of its batch.

    A nudge is the seed of a change of the parameters by less than bf16 rounds.
    """
    config, random = setting.config, np.random.default_rng(nudge)
    scales = scales_in(setting.on_one_device._replace(microbatches=1, overlap='none', unroll=False))

    def nudged(x: jax.Array) -> jax.Array:
        factor = 1 + 1e-3 * random.uniform(-1, 1, x.shape)
        return jax.device_put((np.asarray(x) * factor).astype(x.dtype), x.sharding)

    with compiling(setting), on_mesh(config):
        params = random_params(config, std=0.05)
        params = jax.tree.map(nudged, params) if nudge else params
        given = params, batch_of(setting), jax.random.key(0)
        (loss, _), gradients, seen = jax.jit(make_gradients(config))(*given, None, scales)
        assert {gradient.dtype for gradient in jax.tree.leaves(gradients)} == {np.dtype('float32')}
        found = in_layer_order(gather(gradients), config)
        return float(loss), found, np.asarray(seen.places)


def test_an_evaluation_has_no_scales_and_computes_in_bf16() -> None:
    assert evaluate(ONE) == evaluate(ONE._replace(dtype='bfloat16'))


def test_a_scale_is_of_the_highest_exponent_of_recent_steps() -> None:
    config = ONE.config
    shape = 2, len(linears(config.model)), 3
    places = np.full(shape, -fp8.FIRST_EXPONENT)  # largest numbers in [1, 2)
    remembered = jax.jit(remember)
    recent = remembered(nothing_seen(config), places + 5)
    for _ in range(WINDOW - 1):
        recent = remembered(recent, places)
    tops = [form.top for form in fp8.FORMATS]
    np.testing.assert_array_equal(np.log2(scales_of(recent))[0, 0], np.array(tops) - 5)
    recent = remembered(recent, places)
    np.testing.assert_array_equal(np.log2(scales_of(recent))[0, 0], tops)


def test_an_operand_that_was_only_zero_is_not_scaled() -> None:
    places = np.full((2, len(linears(ONE.config.model)), 3), -1)
    np.testing.assert_array_equal(scales_from(places, ONE.config), np.ones((2, 4, 3)))


EXPONENTS = pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('llama', 1, 4, dtype='fp8')),
        exhaustive(Setting('llama', 2, 2, **SP, dtype='fp8', microbatches=2, recompute='full')),
        exhaustive(Setting('llama', 2, 2, **SP, dtype='fp8', shard='weights')),
        exhaustive(Setting('llama', 2, 2, **SP, dtype='fp8', shard='gradients', microbatches=2)),
        slow(Setting('llama', 1, 2, **SP, dtype='fp8', model_rows=2)),
        exhaustive(Setting('llama', 2, 2, dtype='fp8', context=2, plain=True)),
        exhaustive(Setting('gpt', 2, 2, dtype='fp8')),
        exhaustive(Setting('bert', 2, 2, **SP, dtype='fp8')),
        exhaustive(Setting('llama', 1, 2, **SP, **INTERLEAVED)),
        exhaustive(Setting('llama', 2, 1, **INTERLEAVED, shard='optimizer', recompute='full')),
        exhaustive(Setting('gpt', 2, 1, dtype='fp8', stages=4, num_layers=4, microbatches=6)),
    ],
    ids=str,
)


@EXPONENTS
def test_every_mesh_sees_the_same_exponents_but_for_rounding(setting: Setting) -> None:
    (expected_loss, expected, places), (loss, gradients, own) = map(
        in_fp8, (setting.on_one_device, setting)
    )
    assert relative_error(loss, expected_loss) < 1e-4
    differ = own != places
    if differ.any():  # rounding decides about a largest number next to a power of two
        nudged = [in_fp8(setting.on_one_device, nudge)[2] for nudge in range(1, 9)]
        assert (np.any([each == own for each in nudged], axis=0) | ~differ).all()
        assert differ.mean() < 0.1
    # Programs differ by roundings of bf16, and 8-bit numbers by their last bit where these tip it.
    assert_close(gradients, expected, 0.15)


@pytest.mark.slow
@pytest.mark.exhaustive
@EXPONENTS
def test_every_mesh_gives_the_first_step_the_same_scales(setting: Setting) -> None:
    np.testing.assert_array_equal(scales_in(setting), scales_in(setting.on_one_device))


def gathered(jaxpr: Any) -> Iterator[Any]:
    """The activations that a step gathers over `row`."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'reshard':
            before, after = (x.aval for x in (*equation.invars, *equation.outvars))
            has_row = ['row' in str(x.sharding.spec) for x in (before, after)]
            if before.ndim > 3 and has_row == [True, False]:
                yield before
        for value in jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr):
            if is_jaxpr(value):
                yield from gathered(getattr(value, 'jaxpr', value))


def is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, 'jaxpr', value), 'eqns')


def test_a_grid_gathers_sequences_in_8_bits() -> None:
    setting = Setting('llama', 1, 2, **SP, dtype='fp8', model_rows=2)
    with on_mesh(setting.config):
        params, batch = abstract_state(setting.config).params, batch_of(setting)
        scales = scales_of(nothing_seen(setting.config))
        given = params, batch, jax.random.key(0), None, scales
        program = jax.make_jaxpr(make_gradients(setting.config))(*given)
    width = setting.config.model.hidden_size  # that of the embedding and of the head's input
    found = [str(x.dtype) for x in gathered(program.jaxpr) if x.shape[-1] != width]
    assert found == 2 * ['float8_e4m3fn'] + 2 * ['float8_e5m2']


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        exhaustive(Setting('llama', 2, 4, **SP, rows=8, overlap='batch_split', unroll=True)),
        exhaustive(Setting('llama', 2, 4, **SP, rows=2, overlap='sequence_split')),
        exhaustive(Setting('gpt', 2, 2, overlap='batch_split', unroll=True, recompute='full')),
        exhaustive(Setting('llama', 4, 1, unroll=True, shard='weights')),
        exhaustive(
            Setting('llama', 2, 2, **SP, shard='gradients', overlap='batch_split', unroll=True)
        ),
    ],
    ids=str,
)
def test_layers_in_order_are_those_of_a_loop(setting: Setting) -> None:
    setting = setting._replace(dtype='fp8')
    expected_loss, expected, places = in_fp8(setting._replace(overlap='none', unroll=False))
    loss, gradients, own = in_fp8(setting)
    assert loss == expected_loss
    np.testing.assert_array_equal(own, places)
    assert_close(gradients, expected, 1e-6)


@functools.cache
def keeps_gradients() -> tuple[Config, optax.GradientTransformation, Any]:
    """A step that skips spikes, with its config and an optimizer that stores the gradients."""
    config, optimizer = ONE.on_one_device.config, optax.trace(decay=0)
    config = config.model_copy(update={'train': config.train.changed(spike='skip')})
    return config, optimizer, make_train_step(config, optimizer)


def five_steps_later(guard: Guard) -> tuple[np.ndarray, TrainState, Metrics]:
    """The exponents before a step, five steps after they were seen, and the step's results."""
    before = np.maximum(without_scales(ONE.on_one_device)[1] - 5, 0)
    with on_mesh(ONE.on_one_device.config):
        config, optimizer, train_step = keeps_gradients()
        state = init_state(config, random_params(config, std=0.05), optimizer=optimizer)
        state = state._replace(recent=jnp.asarray(before), guard=guard)
        return before, *train_step(state, batch_of(ONE.on_one_device))


def test_a_spike_is_skipped_and_its_exponents_are_remembered() -> None:
    """If a scale was too large, the spike is the result, and so would the next step be."""
    usual = init_guard()._replace(taken=jnp.int32(USUAL_STEPS))  # losses of zero
    before, state, metrics = five_steps_later(guard=usual)
    assert metrics['spike']
    assert not metrics['taken']
    recent = np.asarray(state.recent)
    np.testing.assert_array_equal(recent, remember(before, recent.argmax(-1)))
    assert (recent != before).any()


def test_a_step_is_near_one_in_fp32_and_not_one_in_bf16_and_remembers_its_exponents() -> None:
    one, (in_bf16, seen) = ONE.on_one_device, without_scales(ONE.on_one_device)
    before, state, metrics = five_steps_later(guard=init_guard())
    loss, gradients = float(metrics['loss']), gather(state.opt_state.trace)
    recent = np.asarray(state.recent)
    np.testing.assert_array_equal(recent, remember(before, recent.argmax(-1)))
    assert np.abs(recent.argmax(-1) - seen.argmax(-1)).max() <= 1  # by rounding to fp8
    exact_loss, exact = loss_and_gradients(one._replace(dtype='float32'))
    assert relative_error(loss, exact_loss) < 1e-4
    # Relative to the largest element; outside the layers it is that of bf16. With eight draws of
    # the parameters the largest error is between 0.09 and 0.18.
    assert_close(gradients, exact, 0.25)
    for name in (name for name in exact if name.startswith('layers.')):
        of_bf16 = relative_error(in_bf16[name], exact[name])
        assert relative_error(gradients[name], exact[name]) > 4 * of_bf16, name


def with_current(setting: Setting) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of a step with current scaling, which needs no earlier step."""
    config = setting._replace(dtype='fp8', fp8_scaling='current').config
    with on_mesh(config):
        given = random_params(config, std=0.05), batch_of(setting), jax.random.key(0)
        (loss, _), gradients, seen = jax.jit(make_gradients(config))(*given)
        assert seen.places is None
        return float(loss), in_layer_order(gather(gradients), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    'setting',
    [
        Setting('llama', 2, 2, **SP, shard='weights', microbatches=2),
        exhaustive(Setting('llama', 1, 4)),
        exhaustive(Setting('llama', 1, 2, **SP, **(INTERLEAVED | {'recompute': 'full'}))),
        exhaustive(Setting('gpt', 2, 2, shard='optimizer')),
        exhaustive(Setting('bert', 2, 2, **SP)),
        exhaustive(Setting('llama', 1, 2, context=2, shard='gradients')),
        exhaustive(Setting('llama', 1, 2, **SP, model_rows=2)),
        exhaustive(Setting('gpt', 2, 1, stages=4, num_layers=4, microbatches=6)),
    ],
    ids=str,
)
def test_current_scales_of_each_shard_give_the_numbers_of_one_device(setting: Setting) -> None:
    loss, gradients = with_current(setting)
    expected_loss, expected = with_current(setting.on_one_device)
    assert relative_error(loss, expected_loss) < 1e-4
    assert_close(gradients, expected, 0.15)
    of_delayed, others, _ = in_fp8(setting.on_one_device._replace(dtype='fp8'))
    assert relative_error(loss, of_delayed) < 1e-4
    assert_close(gradients, others, 0.25)


@pytest.mark.slow
def test_current_scaling_skips_a_step_whose_numbers_are_not_finite() -> None:
    config = ONE._replace(fp8_scaling='current').config
    with on_mesh(config):
        state = random_state(config)
        assert state.recent is None
        weight = state.params['layers']['mlp']['up']['weight']
        weight.set_value(weight.get_value() * jnp.inf)
        _, metrics = make_train_step(config)(state, batch_of(ONE))
        assert not metrics['taken']


def test_a_scale_of_zeros_is_one() -> None:
    largest = jnp.array([0.0, 1.0, 448.0])
    scales = fp8.scale_of(largest, fp8.E4M3)
    np.testing.assert_array_equal(scales, [1, 2.0**6, 2.0**-2])


def started(config: Config) -> TrainState:
    """The state of a run after its first batch has given its scales."""
    return with_scales(config, random_state(config), place_batch(make_batch(config)))


def due_step(calibration: Calibration) -> int:
    """The next step before which scales may be computed."""
    return next(step for step in range(99) if calibration.is_due(step))


@functools.cache
def calibrated_by(*masks: float, resumed_after: int = 0) -> tuple[list[int], np.ndarray]:
    """The scales of a run whose batches have these masks, and the steps that then may set some."""
    config, due = ONE.config, list[int]()
    with on_mesh(config):
        state, calibration = random_state(config), Calibration(config, 0)
        for step, mask in enumerate(masks, 1):
            batch = place_batch(make_batch(config))
            batch['loss_mask'] = batch['loss_mask'] * mask
            state = calibration.scaled(step, state, batch)
            due.append(due_step(calibration))
            if step == resumed_after:
                calibration.rewind(step)
        return due, np.asarray(state.recent)


def test_a_first_batch_that_is_not_finite_gives_no_scale_and_the_next_one_does() -> None:
    due, recent = calibrated_by(np.nan, np.nan, 1.0)
    assert due == [2, 3, 4]
    np.testing.assert_array_equal(recent, calibrated_by(1.0)[1])


def test_an_operand_of_zeros_gets_its_scale_from_a_later_batch() -> None:
    due, zeros = calibrated_by(0.0, 0.0, 0.0)
    assert due == [2, 4, 4]
    has_scale = zeros.any(-1)
    assert has_scale[..., [fp8.X, fp8.W]].all()
    assert not has_scale[..., fp8.DY].any()
    due, recent = calibrated_by(0.0, 1.0)
    assert due == [2, 4]
    np.testing.assert_array_equal(recent, calibrated_by(1.0)[1])


@pytest.mark.parametrize(
    ('masks', 'step'), [((0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0), 5), ((np.nan, np.nan, 1.0), 1)]
)
def test_a_resumed_run_gets_its_scales_from_the_batches_of_an_uninterrupted_one(
    masks: tuple[float, ...], step: int
) -> None:
    (due, recent), (expected_due, expected) = (
        calibrated_by(*masks, resumed_after=after) for after in (step, 0)
    )
    assert due == expected_due
    np.testing.assert_array_equal(recent, expected)


def test_a_step_with_current_scaling_gets_a_scale_for_each_layer_of_a_weight() -> None:
    config = ONE._replace(fp8_scaling='current').config
    with on_mesh(config):
        params = random_params(config, std=0.05)
        found = np.asarray(current(params, config, Layout.of(config)))
        whole = gather(params)
    for index, (sublayer, linear) in enumerate(linears(config.model)):
        largest = [np.abs(x).max() for x in whole[f'layers.{sublayer}.{linear}.weight']]
        expected = 2.0 ** (6 - np.floor(np.log2(largest)))  # the largest number is in [64, 128)
        np.testing.assert_array_equal(found[:, index, fp8.W], expected)
    assert (found[..., [fp8.X, fp8.DY]] == 1).all()


@pytest.mark.parametrize('is_lost', [False, True])
def test_a_resumed_run_sets_a_lost_scale_in_the_same_step_as_an_uninterrupted_one(
    is_lost: bool,
) -> None:
    state = SimpleNamespace(recent=np.ones((2, 4, 3, fp8.NUM_EXPONENTS)))
    uninterrupted, resumed = Calibration(ONE.config, 0), Calibration(ONE.config, 4)
    for step in (1, 2, 4):
        assert uninterrupted.scaled(step, state, {}) is state
    state.recent[0, 0, fp8.DY] = not is_lost
    assert resumed.scaled(5, state, {}) is state
    assert due_step(resumed) == due_step(uninterrupted) == 8


def test_after_a_rollback_the_scales_are_checked_again() -> None:
    config, state = ONE.config, SimpleNamespace(recent=np.ones((2, 4, 3, fp8.NUM_EXPONENTS)))
    calibration = Calibration(config, 4)
    assert calibration.scaled(5, state, {}) is state
    assert due_step(calibration) == 8
    calibration.rewind(2)
    assert due_step(calibration) == 3
    in_bf16 = Calibration(ONE._replace(dtype='bfloat16').config, 4)
    in_bf16.rewind(2)
    assert not any(map(in_bf16.is_due, range(9)))


@pytest.mark.slow
def test_a_number_that_is_not_finite_skips_the_step_and_changes_no_scale() -> None:
    config = ONE.config
    with on_mesh(config):
        state = started(config)
        kept = np.asarray(state.recent)
        weight = state.params['layers']['mlp']['up']['weight']
        weight.set_value(weight.get_value() * jnp.inf)
        state, metrics = make_train_step(config)(state, batch_of(ONE))
        assert not metrics['taken']
        np.testing.assert_array_equal(state.recent, kept)


def config_of(data: int, model: int, dtype: str = 'fp8', scaling: str = 'delayed') -> Config:
    """A small model on a mesh."""
    return tiny(data, model, train={'dtype': dtype, 'fp8_scaling': scaling})


@functools.cache
def step_of(config: Config) -> Any:
    """The step of a config, which is compiled once for all tests."""
    return make_train_step(config)


def steps(config: Config, state: TrainState, seeds: range) -> tuple[TrainState, list[float]]:
    """Take a step with the batch of each seed; return the state and the losses."""
    train_step, losses = step_of(config), []
    for seed in seeds:
        state, metrics = train_step(state, place_batch(make_batch(config, seed=seed)))
        losses.append(float(metrics['loss']))
    return state, losses


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint after two steps in fp8 on 2x2 devices, and the losses of two more steps."""
    folder, config = tmp_path_factory.mktemp('fp8'), config_of(2, 2)
    with on_mesh(config):
        state, _ = steps(config, started(config), range(2))
        with Checkpoints(folder, config) as checkpoints:
            checkpoints.save(state, 2)
            checkpoints.wait()
        return folder, steps(config, state, range(2, 4))[1]


def resumed(folder: Path, config: Config) -> TrainState:
    """The state of the checkpoint in a folder, as a run with this config resumes from it."""
    with Checkpoints(folder, config) as checkpoints:
        return checkpoints.restore(2)


def test_a_resume_has_the_scales_of_the_checkpoint_and_measures_no_others(tmp_path: Path) -> None:
    config = config_of(2, 2)
    with on_mesh(config):
        with Checkpoints(tmp_path, config) as checkpoints:
            checkpoints.save(make_state(config, 1), 2)
            checkpoints.wait()
        state = resumed(tmp_path, config)
        assert equal(state, config, 1)
        assert with_scales(config, state, {}) is state


@pytest.mark.slow
def test_a_resume_goes_on_with_the_same_bits(saved: tuple[Path, list[float]]) -> None:
    folder, losses = saved
    config = config_of(2, 2)
    with on_mesh(config):
        state = with_scales(config, resumed(folder, config), place_batch(make_batch(config)))
        assert steps(config, state, range(2, 4))[1] == losses


@pytest.mark.slow
def test_a_resume_on_another_mesh_has_the_same_scales(saved: tuple[Path, list[float]]) -> None:
    folder, losses = saved
    config = config_of(1, 4)
    with on_mesh(config):
        state = resumed(folder, config)
        assert np.asarray(state.recent).any()
        _, own = steps(config, state, range(2, 4))
        np.testing.assert_allclose(own, losses, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('there', 'here'),
    [
        exhaustive(('fp8', 'delayed'), ('bfloat16', 'delayed')),
        (('bfloat16', 'delayed'), ('fp8', 'delayed')),
        exhaustive(('fp8', 'delayed'), ('fp8', 'current')),
        exhaustive(('fp8', 'current'), ('fp8', 'delayed')),
    ],
)
def test_a_resume_may_change_between_bf16_and_each_scaling_of_fp8(
    there: tuple[str, str],
    here: tuple[str, str],
    saved: tuple[Path, list[float]],
    tmp_path: Path,
) -> None:
    folder, losses = saved
    config = config_of(2, 2, *here)
    with on_mesh(config):
        if there != ('fp8', 'delayed'):
            folder, old = tmp_path, config_of(2, 2, *there)
            with Checkpoints(folder, old) as checkpoints:
                checkpoints.save(steps(old, random_state(old), range(2))[0], 2)
                checkpoints.wait()
        batch = place_batch(make_batch(config, seed=2))
        state = with_scales(config, resumed(folder, config), batch)
        assert (state.recent is not None) is (here == ('fp8', 'delayed'))
        _, own = steps(config, state, range(2, 4))
        np.testing.assert_allclose(own, losses, rtol=1e-3)
