"""Whether a step may change anything: decided inside it, from numbers that every device has, so that all processes agree."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from megajax.config import Config, NumericError

WINDOW = 128  # steps whose losses say what is usual, as in OLMo and Levanter
DEVIATIONS = 6.0  # a loss this many standard deviations above their mean is a spike


SKIPS_IN_A_ROW = 3  # after so many the run ends
ROUNDING = 1e-3  # nats that a cross entropy may be below zero


class Guard(NamedTuple):
    """The losses of the last steps that were taken, fp32 [WINDOW], how many have ever been taken, and how many were skipped in a row."""

    losses: jax.Array
    taken: jax.Array
    skipped_in_a_row: jax.Array


class Verdict(NamedTuple):
    """Whether the step is taken, whether loss and gradients were finite, whether the loss was a spike, or its scale too large for fp16.

    And skips in a row with this one, but for those of the scale.
    """

    taken: jax.Array
    finite: jax.Array
    spike: jax.Array
    overflow: jax.Array
    skipped_in_a_row: jax.Array


def init_guard() -> Guard:
    """Nothing seen yet."""
    return Guard(
        losses=jnp.zeros(WINDOW, jnp.float32),
        taken=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def judge(
    guard: Guard,
    loss: jax.Array,
    nll: jax.Array,
    grad_norm: jax.Array,
    *,
    overflow: jax.Array,
    spikes: bool,
) -> tuple[Verdict, Guard]:
    """A step is taken if its loss and gradients are finite and, with `spikes`, its loss is no spike; the guard after it.

    A negative log-likelihood below zero, which only a label outside the vocabulary has, counts as not finite.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (nll >= -ROUNDING)
    usual = guard.losses.mean() + DEVIATIONS * guard.losses.std()
    spike = finite & (guard.taken >= WINDOW) & (loss > usual)
    taken = finite & ~spike if spikes else finite
    # the oldest loss makes room; a loss that is not finite must not come near the sum, not even times zero
    here = taken & (jnp.arange(WINDOW) == guard.taken % WINDOW)
    after = Guard(
        losses=jnp.where(here, loss, guard.losses),
        taken=guard.taken + taken,
        skipped_in_a_row=jnp.where(taken, 0, guard.skipped_in_a_row + ~overflow),
    )
    return Verdict(taken, finite, spike, overflow, after.skipped_in_a_row), after


def respond(
    config: Config, step: int, metrics: Mapping[str, float]
) -> Literal['go on', 'roll back']:
    """What a run does after `step`, the same in every process. Raises NumericError if it must end."""
    if metrics['taken'] or metrics['overflow']:
        return 'go on'
    key, policy = (
        ('spike', config.train.spike)
        if metrics['finite']
        else ('nonfinite', config.train.nonfinite)
    )
    what = 'is a spike' if metrics['finite'] else 'or its gradient is not finite'
    if metrics['nll'] < -ROUNDING:
        what = f'has a cross entropy of {metrics["nll"]:.4g}, which is never below zero: a label is no token of the vocabulary'
    event = f'step {step}: the loss ({metrics["loss"]:.4g}, gradient norm {metrics["grad_norm"]:.4g}) {what}'
    if policy == 'stop':
        raise NumericError(
            f'{event}; train.{key}=stop: look at the batch, lower optim.lr, or set train.{key}=skip'
        )
    if policy == 'skip' and metrics['skipped_in_a_row'] >= SKIPS_IN_A_ROW:
        raise NumericError(
            f'{event}, as in the {SKIPS_IN_A_ROW - 1} steps before it; lower optim.lr, or set train.{key}=rollback'
        )
    return 'roll back' if policy == 'rollback' else 'go on'
