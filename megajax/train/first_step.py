"""The first step of a run in fp16, which finds the loss scale that the run begins with.

What overflows first is not the gradient of a logit, whose largest is known, but one that grows on its way down: a norm divides by
the deviation of its input, so gradients of the embedding are those of the first norm's output over the embedding's small numbers.
How large they get depends on the model and on the batch, so it is tried.
"""

from collections.abc import Callable

import jax
import numpy as np

from megajax.train.feed import Batch
from megajax.train.loss_scale import HYSTERESIS, MARGIN, SMALLEST
from megajax.train.step import Metrics, TrainState

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def take_first_step(
    train_step: TrainStep, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """Take the step at the largest scale, from that of `state` down, at which no gradient overflows; the next has it over MARGIN.

    A step that overflows changes neither parameters nor optimizer, so it is taken again with the same batch and dropout until it
    holds: nothing is compiled for it, and no batch is lost.
    """
    assert state.loss_scale is not None
    step, batches, tried = int(state.step), int(state.batches), float(state.loss_scale.value)
    while True:
        state, metrics = train_step(state, batch)
        if metrics['taken']:
            return _with_scale(state, max(tried / MARGIN, SMALLEST)), metrics
        if not metrics['overflow']:  # the loss itself is not finite, and says nothing of the scale
            return state, metrics
        tried /= 2
        state = _with_scale(state, tried)._replace(
            step=_like(state.step, step), batches=_like(state.batches, batches)
        )


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
