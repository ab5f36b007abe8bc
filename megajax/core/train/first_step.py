"""The first step of a run in fp16 or fp8, which finds the initial scales.

In fp8 the first batch gives the scale of every operand. In fp16 it gives the loss scale. The first
gradient to overflow is not the gradient of a logit, whose maximum is known, but one that grows
during backpropagation. A norm divides by the standard deviation of its input, so the embedding's
gradients are the gradients of the first norm's output, divided by the embedding's small numbers.
Their size depends on the model and on the batch, so the scale is found by trial.
"""

from collections.abc import Callable

import jax
import numpy as np

from megajax.core.config import Config
from megajax.core.train.feed import Batch
from megajax.core.train.loss_scale import HYSTERESIS, MARGIN, SMALLEST
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
    """Return the state with fp8 scales computed from a batch, unless it already has scales."""
    if state.recent is None or jax.device_get(state.recent).any():
        return state
    return state._replace(recent=make_calibration(config)(state.params, state.step, batch))


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
