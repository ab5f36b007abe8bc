"""Guards against non-finite values and loss spikes: they decide whether a step applies its update.

The decision is made inside the step, from numbers that every device has, so that all processes
agree.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from megajax.core.config import Config, NumericError

USUAL_STEPS = 128  # steps whose losses define the usual range, as in OLMo and Levanter
DEVIATIONS = 6.0  # a loss more than this many standard deviations above the mean is a spike


SKIPS_IN_A_ROW = 3  # the run ends after this many skipped updates in a row
ROUNDING = 1e-3  # nats by which a cross entropy may be below zero


class Guard(NamedTuple):
    """Recent losses and counts of applied and skipped updates, by which a step is judged."""

    losses: jax.Array  # fp32 [USUAL_STEPS], losses of the last steps whose update was applied
    taken: jax.Array  # updates applied since the run began
    skipped_in_a_row: jax.Array  # updates skipped since the last applied one, without overflows


class Verdict(NamedTuple):
    """The outcome of a step: whether its update was applied and, if not, why."""

    taken: jax.Array  # the update was applied
    finite: jax.Array  # loss and gradients were finite
    spike: jax.Array  # the loss was a spike
    overflow: jax.Array  # the loss scale was too large for fp16
    # updates skipped in a row, including this one, not counting overflows
    skipped_in_a_row: jax.Array


def init_guard() -> Guard:
    """Return the guard before the first step: no losses, all counts zero."""
    return Guard(
        losses=jnp.zeros(USUAL_STEPS, jnp.float32),
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
    """Decide whether the update of a step is applied; return the verdict and the guard after it.

    The update is applied if loss and gradients are finite and, with `spikes`, the loss is not a
    spike. A negative log-likelihood below zero, which only a label outside the vocabulary can
    cause, counts as not finite.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (nll >= -ROUNDING)
    usual = guard.losses.mean() + DEVIATIONS * guard.losses.std()
    spike = finite & (guard.taken >= USUAL_STEPS) & (loss > usual)
    taken = finite & ~spike if spikes else finite
    # The loss replaces the oldest one. A loss that is not finite must not enter the arithmetic at
    # all, not even multiplied by zero.
    here = taken & (jnp.arange(USUAL_STEPS) == guard.taken % USUAL_STEPS)
    after = Guard(
        losses=jnp.where(here, loss, guard.losses),
        taken=guard.taken + taken,
        skipped_in_a_row=jnp.where(taken, 0, guard.skipped_in_a_row + ~overflow),
    )
    return Verdict(taken, finite, spike, overflow, after.skipped_in_a_row), after


def respond(
    config: Config, step: int, metrics: Mapping[str, float]
) -> Literal['go on', 'roll back']:
    """Decide how a run continues after `step`; every process decides the same.

    Raises NumericError if the run must end.
    """
    if metrics['taken'] or metrics['overflow']:
        return 'go on'
    key, policy = (
        ('spike', config.train.spike)
        if metrics['finite']
        else ('nonfinite', config.train.nonfinite)
    )
    what = 'is a spike' if metrics['finite'] else 'or its gradient is not finite'
    if metrics['nll'] < -ROUNDING:
        what = (
            f'has a cross entropy of {metrics["nll"]:.4g}, which is never below zero: '
            'a label is not a token of the vocabulary'
        )
    numbers = f'{metrics["loss"]:.4g}, gradient norm {metrics["grad_norm"]:.4g}'
    event = f'step {step}: the loss ({numbers}) {what}'
    if policy == 'stop':
        raise NumericError(
            f'{event}; train.{key}=stop: inspect the batch, lower optim.lr, or set train.{key}=skip'
        )
    if policy == 'skip' and metrics['skipped_in_a_row'] >= SKIPS_IN_A_ROW:
        raise NumericError(
            f'{event}, as in the {SKIPS_IN_A_ROW - 1} steps before it; lower optim.lr, '
            f'or set train.{key}=rollback'
        )
    return 'roll back' if policy == 'rollback' else 'go on'
