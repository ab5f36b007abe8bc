"""A small model's checkpoints: its config, states whose every number is known, and whether one
holds them.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from support import make_config

from megajax.checkpoint.checkpoints import Checkpoints
from megajax.config import Config
from megajax.parallel.mesh import concrete
from megajax.train.step import TrainState, init_state

TINY = {'num_layers': 1, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 300, 'dropout': 0.0}


def tiny(data: int = 2, model: int = 2, /, **sections: dict[str, Any]) -> Config:
    return make_config(
        'gpt', data, model, **{**sections, 'model': TINY | sections.get('model', {})}
    )


def make_state(config: Config, seed: int) -> TrainState:
    """A state of random numbers in its places, made in numpy, so without compiling."""
    random = np.random.default_rng(seed)
    abstract = concrete(jax.eval_shape(lambda: init_state(config)))
    return jax.tree.map(
        lambda x: jax.device_put(random.normal(0, 9, x.shape).astype(x.dtype), x.sharding), abstract
    )


def leaves(state: TrainState) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def equal(state: TrainState, config: Config, seed: int) -> bool:
    return all(
        np.array_equal(a, b)
        for a, b in zip(leaves(state), leaves(make_state(config, seed)), strict=True)
    )


def newest(folder: Path) -> int | None:
    with Checkpoints(folder, tiny()) as checkpoints:
        return checkpoints.newest_verified()
