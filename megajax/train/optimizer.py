"""AdamW as Megatron has it: clipping by the global norm, no decay on biases and norms, warm-up before the schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.config import Config, OptimConfig
from megajax.model.parameters import map_parameters

WSD_DECAY = 0.2  # the last fifth of the steps, as in MiniCPM (Hu et al., 2024) and after


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clip, then AdamW; the state of each parameter lies where the parameter lies."""
    optim = config.optim
    adamw = optax.adamw(
        make_schedule(optim, config.train.steps),
        b1=optim.beta1,
        b2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decays,
    )
    return optax.chain(optax.clip_by_global_norm(optim.grad_clip), adamw)


def make_schedule(optim: OptimConfig, steps: int) -> Callable[[Any], jax.Array]:
    """The learning rate of step 0, 1, ...: linear warm-up to `lr`, which the first step after it has, then down to `min_lr`."""
    warmup = optim.warmup_steps

    def learning_rate(step: Any) -> jax.Array:
        progress = jnp.clip((step - warmup) / max(steps - warmup, 1), 0, 1)
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
    """A tree of booleans: which parameters decay, all but biases and norms."""
    return map_parameters(lambda declared, _: declared.decays, params)
