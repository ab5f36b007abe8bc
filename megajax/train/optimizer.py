"""AdamW as in Megatron: global-norm clipping, no weight decay on biases and norms, warm-up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.config import Config, OptimConfig
from megajax.model.parameters import map_parameters
from megajax.parallel.layout import Layout
from megajax.train.moments import with_moments_in_bf16

# The fraction of the steps, at their end, in which the rate decays: the last fifth, as in MiniCPM
# (Hu et al., 2024) and its successors.
WSD_DECAY = 0.2


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return clipping followed by AdamW; moments have the placement of their parameter."""
    optim = config.optim
    adam = optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps)
    if optim.moments_dtype == 'bfloat16':
        adam = with_moments_in_bf16(adam, Layout.of(config))
    adamw = optax.chain(
        adam,
        optax.add_decayed_weights(optim.weight_decay, decays),
        optax.scale_by_learning_rate(make_schedule(optim, config.train.steps)),
    )
    return optax.chain(optax.clip_by_global_norm(optim.grad_clip), adamw)


def make_schedule(optim: OptimConfig, steps: int) -> Callable[[Any], jax.Array]:
    """Return the learning rate as a function of the step, which counts from 0.

    It rises linearly to `lr`, which the first step after the warm-up has, and then follows
    `optim.schedule` down to `min_lr`, which it has from `optim.decay_steps` on.
    """
    warmup, end = optim.warmup_steps, optim.decay_steps or steps

    def learning_rate(step: Any) -> jax.Array:
        progress = jnp.clip((step - warmup) / max(end - warmup, 1), 0, 1)
        remaining = {
            'constant': jnp.ones_like(progress),
            'linear': 1 - progress,
            'cosine': (1 + jnp.cos(jnp.pi * progress)) / 2,
            'wsd': jnp.clip((1 - progress) / WSD_DECAY, 0, 1),
        }[optim.schedule]
        decayed = optim.min_lr + (optim.lr - optim.min_lr) * remaining
        return jnp.where(step < warmup, optim.lr * (step + 1) / (warmup + 1), decayed)

    return learning_rate


def decays(params: Any) -> Any:
    """A tree of booleans: does weight decay apply to the parameter? To all but biases and norms."""
    return map_parameters(lambda declared, _: declared.decays, params)
