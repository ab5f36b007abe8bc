"""The first step of a run in fp16 or fp8, which finds the initial scales.

In fp8 the first batch gives the scale of each operand. Later batches give the scales of operands
that were zero in the whole first batch.

In fp16 the first batch gives the loss scale. The first gradient to overflow is not the gradient of
a logit, whose maximum is known, but one that grows during backpropagation. A norm divides by the
standard deviation of its input, so the embedding's gradients are the gradients of the first norm's
output, divided by the embedding's small numbers. Their size depends on the model and on the batch,
so the scale is found by trial.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.stages import Wrapped

from megajax.core.config import Config
from megajax.core.train.feed import Batch
from megajax.core.train.loss_scale import HYSTERESIS, MARGIN, SMALLEST
from megajax.core.train.scaling import are_all_finite, has_scale
from megajax.core.train.step import Metrics, TrainState, make_calibration

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def take_first_step(
    train_step: TrainStep, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Take the step at the largest scale at which no gradient overflows.

    The first try uses the scale in `state`, and each failure halves it. The next step uses the
    scale that succeeded, divided by MARGIN. A step that overflows changes neither parameters nor
    optimizer, so it is repeated with the same batch and the same dropout; nothing is compiled
    again, and no batch is lost.
    """
    assert state.loss_scale is not None
    step, batches, tried = int(state.step), int(state.batches), float(state.loss_scale.value)
    while True:
        state, metrics = train_step(state, batch)
        if metrics['taken']:
            return _with_scale(state, max(tried / MARGIN, SMALLEST)), metrics
        # the loss itself is not finite, which says nothing about the scale
        if not metrics['overflow']:
            return state, metrics
        tried /= 2
        state = _with_scale(state, tried)._replace(
            step=_like(state.step, step), batches=_like(state.batches, batches)
        )


def with_scales(config: Config, state: TrainState, batch: Batch) -> TrainState:
    """Return the state with fp8 scales, computed from a batch, for operands that have none.

    An operand that is zero in the whole batch gets no scale, and no operand gets one if any of them
    is not finite; call the function again with a later batch.
    """
    return Calibration(config, 0).scaled(1, state, batch)


class Calibration:
    """The fp8 scales of a run, computed from batches for the operands that have none.

    A small number without a scale is rounded to zero, so no later step would measure it. Scales are
    computed before every step until an operand has one, then only before steps whose number is a
    power of two, because some operands may be zero in every batch. Only the step and its state
    decide, so a resumed run computes scales from the same batches as an uninterrupted run.
    """

    def __init__(self, config: Config, step: int):
        self._config = config
        self._calibrate: Wrapped | None = None
        self.rewind(step)

    def rewind(self, step: int) -> None:
        """Check the scales in the step after `step`, for example after a rollback."""
        self._next = step + 1 if self._config.train.has_delayed_scales else None

    def is_due(self, step: int) -> bool:
        """Whether scales may be computed before a step."""
        return step == self._next

    def scaled(self, step: int, state: TrainState, batch: Batch) -> TrainState:
        """Return the state before a step with the scales that its batch gives."""
        if state.recent is None or not self.is_due(step):
            return state
        recent = jax.device_get(state.recent)
        self._next = 2 ** step.bit_length()  # the next power of two
        is_scaled, is_power_of_two = has_scale(recent), step.bit_count() == 1
        if is_scaled.all() or (is_scaled.any() and not is_power_of_two):
            return state
        if self._calibrate is None:
            self._calibrate = make_calibration(self._config)
        found = jax.device_get(self._calibrate(state.params, state.step, batch))
        if are_all_finite(found):
            recent = np.where(is_scaled[..., None], recent, found)
            state = state._replace(recent=jax.device_put(recent, state.recent.sharding))
        if not has_scale(recent).any():
            self._next = step + 1
        return state


def _with_scale(state: TrainState, value: float) -> TrainState:
    scale = state.loss_scale
    assert scale is not None
    fresh = scale._replace(
        value=_like(scale.value, value),
        steady_steps=_like(scale.steady_steps, 0),
        overflows_left=_like(scale.overflows_left, HYSTERESIS),
    )
    return state._replace(loss_scale=fresh)


def _like(x: jax.Array, value: float) -> jax.Array:
    return jax.device_put(np.asarray(value, x.dtype), x.sharding)
