"""AdamW or Muon as in Megatron: global-norm clipping, warm-up, no decay of vectors."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from megajax.core.config import Config, OptimConfig
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout
from megajax.core.train.moments import with_moments_in_bf16
from megajax.core.train.muon import with_muon

# The fraction of the steps, at their end, in which the learning rate decays, as in MiniCPM (Hu et
# al., 2024) and its successors.
WSD_DECAY = 0.2


def make_optimizer(
    config: Config, *, rounded_to: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Return clipping followed by `optim.kind`; moments are sharded like their parameters.

    `rounded_to` is the dtype that Muon's coefficients are rounded to, by default the dtype of its
    iterations.
    """
    optim = config.optim
    adam = optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps)
    if optim.kind == 'muon':
        adam = with_muon(adam, config, rounded_to)
    if optim.moments_dtype == 'bfloat16':
        adam = with_moments_in_bf16(adam, Layout.of(config))
    decayed = optax.chain(
        adam,
        optax.add_decayed_weights(optim.weight_decay, decays),
        optax.scale_by_learning_rate(make_schedule(optim, config.train.steps)),
    )
    return optax.chain(optax.clip_by_global_norm(optim.grad_clip), decayed)


def learning_rate(config: Config) -> Callable[[Any], jax.Array]:
    """Return the config's learning rate as a function of the step, for an optimizer of your own."""
    return make_schedule(config.optim, config.train.steps)


def make_schedule(optim: OptimConfig, steps: int) -> Callable[[Any], jax.Array]:
    """Return the learning rate as a function of the step, which counts from 0.

    The rate rises linearly to `lr`, which it reaches at the first step after the warm-up. It then
    follows `optim.schedule` down to `min_lr`, which it reaches at `optim.decay_steps` and keeps.
    With `optim.warmup_init`, the rate equals that of Megatron-LM's OptimizerParamScheduler at every
    step.
    """
    warmup, end = optim.warmup_steps, optim.decay_steps or steps
    fall = optim.wsd_steps or WSD_DECAY * (end - warmup)

    def rising(step: Any) -> Any:
        if optim.warmup_init is None:
            return optim.lr * (step + 1) / (warmup + 1)
        return optim.warmup_init + (optim.lr - optim.warmup_init) * step / (warmup or 1)

    def learning_rate(step: Any) -> jax.Array:
        progress = jnp.clip(_since(warmup, step) / (end - warmup), 0, 1)
        fallen = jnp.clip(_since(end - fall, step) / fall, 0, 1)
        remaining = {
            'constant': jnp.ones_like(progress),
            'linear': 1 - progress,
            'cosine': (1 + jnp.cos(jnp.pi * progress)) / 2,
            'wsd': {
                'linear': 1 - fallen,
                'cosine': (1 + jnp.cos(jnp.pi * fallen)) / 2,
                'exponential': 2 * 0.5**fallen - 1,
                'minus_sqrt': 1 - jnp.sqrt(fallen),
            }[optim.wsd_decay],
        }
        if optim.schedule == 'inverse_sqrt':
            slow = jnp.maximum(optim.min_lr, optim.lr * jnp.sqrt(warmup / jnp.maximum(step, 1)))
            decayed = jnp.where(step > end, optim.min_lr, slow)
        else:
            decayed = optim.min_lr + (optim.lr - optim.min_lr) * remaining[optim.schedule]
        return jnp.where(step < warmup, rising(step), decayed)

    return learning_rate


def _since(point: float, step: Any) -> Any:
    """Return the steps since a point of the schedule; near the point they are exact in fp32."""
    return step - math.floor(point) - point % 1


def decays(params: Any) -> Any:
    """Return a tree of booleans, the mask of weight decay for an optimizer of your own.

    All parameters decay except biases, norms, attention sinks, and the gates of cross-attention.
    """
    return map_parameters(lambda declared, _: declared.decays, params)
