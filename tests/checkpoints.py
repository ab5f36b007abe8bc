"""A small model's checkpoints: its config, states whose every number is known, and whether one
holds them.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from support import abstract_state, make_config

from megajax.core.config import Config
from megajax.core.parallel.layout import Layout
from megajax.core.train.step import TrainState
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.unpadded import unpadded

TINY = {'num_layers': 1, 'hidden_size': 32, 'num_heads': 4, 'vocab_size': 300, 'dropout': 0.0}


def tiny(data: int = 2, model: int = 2, /, **sections: dict[str, Any]) -> Config:
    return make_config(
        'gpt', data, model, **{**sections, 'model': TINY | sections.get('model', {})}
    )


# Meshes, rungs, replicas and grids that lay the tiny model's arrays out differently; three data
# shards pad its hidden size of 32.
LAYOUTS: dict[str, dict[str, Any]] = {
    'one device': {},
    'data=3 x model=2, weights': {
        'mesh': {'data': 3, 'model': 2},
        'optim': {'shard': 'weights'},
    },
    'data=4 replicas=2 x model=2, gradients': {
        'mesh': {'data': 4, 'replicas': 2, 'model': 2},
        'optim': {'shard': 'gradients'},
    },
    'data=6 replicas=2 x model=1, weights': {
        'mesh': {'data': 6, 'replicas': 2},
        'optim': {'shard': 'weights'},
    },
    'data=2 x model_rows=2 model=2, optimizer': {
        'mesh': {'data': 2, 'model_rows': 2, 'model': 2, 'sequence_parallel': True},
        'optim': {'shard': 'optimizer'},
    },
}


# The same for a model of several layers, whose stages do not have them in the model's order.
STAGED: dict[str, dict[str, Any]] = {
    'data=1 x model=1': {},
    'stages=4 x data=1 x model=2, optimizer': {
        'mesh': {'stages': 4, 'model': 2},
        'optim': {'shard': 'optimizer'},
    },
    'stages=4 virtual_stages=2 x data=1 x model=2': {
        'mesh': {'stages': 4, 'virtual_stages': 2, 'model': 2},
    },
    'stages=2 virtual_stages=2 x data=1 x context=2 x model=2, optimizer': {
        'mesh': {'stages': 2, 'virtual_stages': 2, 'context': 2, 'model': 2},
        'optim': {'shard': 'optimizer'},
    },
}


def staged(layout: str, **optim: Any) -> Config:
    """The tiny model with eight layers in one of STAGED."""
    sections = STAGED[layout]
    return tiny(
        1,
        1,
        model={'num_layers': 8},
        train={'batch_size': 16, 'microbatches': 4},
        mesh=sections.get('mesh', {}),
        optim=sections.get('optim', {}) | optim,
    )


def laid_out(layout: str, **sections: dict[str, Any]) -> Config:
    """The tiny model in one of LAYOUTS."""
    own = LAYOUTS[layout]
    merged = {'train': {'batch_size': 24}} | own
    for name, section in sections.items():
        merged[name] = merged.get(name, {}) | section
    return tiny(1, 1, **merged)


def make_state(config: Config, seed: int) -> TrainState:
    """A state of random numbers in its places, the same on every mesh; zeros are what pads a shard.
    It is made in numpy, so without compiling.
    """
    random = np.random.default_rng(seed)
    abstract, layout = abstract_state(config), Layout.of(config)
    order = layout.layer_order(config.model.num_layers)

    def is_stacked(x: Any) -> Any:
        is_variable = isinstance(x, nnx.Variable)
        return x.replace(x.declared.is_stacked) if is_variable else False

    def draw(x: jax.ShapeDtypeStruct, own: jax.ShapeDtypeStruct, stacked: bool) -> jax.Array:
        value = np.zeros(x.shape, x.dtype)
        # Through float32, so that a state of bfloat16 is the state of float32 rounded.
        numbers = random.normal(0, 9, own.shape).astype(np.float32)
        value[tuple(map(slice, own.shape))] = numbers.astype(x.dtype)
        return jax.device_put(value[order] if stacked else value, x.sharding)

    stacked = jax.tree.map(is_stacked, abstract, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.map(draw, abstract, unpadded(abstract, layout), stacked)


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
