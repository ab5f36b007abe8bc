"""The dynamic loss scale of fp16 (Micikevicius et al., 2018), with Megatron's rules and constants.

fp16 has 5 exponent bits, so gradients of activations below 6e-8 are lost. The loss is therefore
multiplied by a power of two before it is differentiated, and the gradients are divided by it in
fp32. The update of a step whose gradients overflow is skipped, and the scale is lowered.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.core.config import Config
from megajax.core.config.rules import LARGEST_LOSS_SCALE
from megajax.core.train.feed import Batch

SMALLEST = 1.0
GROWTH_STEPS = 1000  # the scale is doubled after this many steps without an overflow
# Number of overflows that halves the scale. After that, each overflow halves it, until the scale is
# doubled again.
HYSTERESIS = 2
HEADROOM = 2.0**15  # the largest power of two in fp16
# The initial scale of a run is the largest one that works for the first batch, divided by this
# factor, because the gradients of other batches may be larger.
MARGIN = 4.0


class LossScale(NamedTuple):
    """The loss scale and the counts that decide when it changes."""

    value: jax.Array  # fp32
    steady_steps: jax.Array  # steps without an overflow since the scale last changed
    overflows_left: jax.Array  # overflows until the scale is halved


def init_loss_scale(config: Config) -> LossScale | None:
    """Return the scale before the first step, `train.loss_scale`; None unless in fp16.

    With `auto`, the scale is the smaller one of 2^32 and the largest scale at which the gradient of
    a logit is finite; `core/train/first_step.py` lowers it from there. A logit's gradient is at
    most 1 / (tokens of a batch), or 1 / sequences for BERT's sentence-order prediction.
    """
    if config.train.dtype != 'float16':
        return None
    if config.train.loss_scale == 'auto':
        terms = config.train.batch_size * (1 if config.model.is_bert else config.train.seq_len)
        first = min(LARGEST_LOSS_SCALE, HEADROOM * 2.0 ** math.floor(math.log2(terms)))
    else:
        first = config.train.loss_scale
    return LossScale(jnp.float32(first), jnp.int32(0), jnp.int32(HYSTERESIS))


def scale_weights(loss_scale: LossScale | None, batch: Batch) -> Batch:
    """Scale the weights of tokens and sequences, and so the loss, before anything is in fp16."""
    if loss_scale is None:
        return batch
    return {
        name: x * loss_scale.value if name in ('weights', 'row_weights') else x
        for name, x in batch.items()
    }


def unscale(loss_scale: LossScale | None, sums_and_gradients: Any) -> Any:
    """Divide sums and gradients by the scale, which is exact: the scale is a power of two."""
    return (
        sums_and_gradients
        if loss_scale is None
        else jax.tree.map(lambda x: x / loss_scale.value, sums_and_gradients)
    )


def overflows(loss_scale: LossScale | None, loss: jax.Array, grad_norm: jax.Array) -> jax.Array:
    """Whether the gradients of a finite loss are not finite, which a smaller scale may prevent."""
    if loss_scale is None:
        return jnp.array(False)
    return jnp.isfinite(loss) & ~jnp.isfinite(grad_norm) & (loss_scale.value > SMALLEST)


def adjust(loss_scale: LossScale | None, overflow: jax.Array) -> LossScale | None:
    """Return the scale for the next step."""
    if loss_scale is None:
        return None
    steady = jnp.where(overflow, 0, loss_scale.steady_steps + 1)
    left = loss_scale.overflows_left - overflow
    grow, shrink = steady == GROWTH_STEPS, overflow & (left <= 0)
    value = jnp.where(
        shrink,
        jnp.maximum(loss_scale.value / 2, SMALLEST),
        jnp.where(grow, loss_scale.value * 2, loss_scale.value),
    )
    return LossScale(value, jnp.where(grow, 0, steady), jnp.where(grow, HYSTERESIS, left))
