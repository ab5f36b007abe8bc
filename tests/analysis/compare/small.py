"""A small model whose pass is recorded, from the same seed on every mesh."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from support import make_config

from megajax.analysis.compare.execute import execute
from megajax.analysis.compare.recording import Recording
from megajax.analysis.compare.sources import Source
from megajax.analysis.inspect.random_batch import make_batch
from megajax.core.config import Config

PLAIN = {'num_layers': 2, 'hidden_size': 32, 'num_heads': 4, 'head_dim': 8, 'ffn_size': 64}
# Stages need a microbatch each, and eight data shards a row each.
TRAIN = {'batch_size': 8, 'seq_len': 16}


def small(name: str = 'llama', **sections: dict[str, Any]) -> Config:
    """A model of two layers on one device, unless a section `mesh` says otherwise."""
    own = {'model': PLAIN, 'train': TRAIN}
    merged = {key: own.get(key, {}) | sections.get(key, {}) for key in {*own, *sections}}
    return make_config(name, **merged)


def from_seed(config: Config) -> nnx.State:
    """The parameters that `train.seed` gives."""
    return Source(name='small', kind='config', path=Path('small'), overrides=()).load(config)


def recorded(config: Config, load: Callable[[Config], nnx.State] = from_seed) -> Recording:
    """The numbers of a pass over random tokens."""
    return execute(config, load, make_batch(config), source='small')


@functools.cache
def on_one_device(name: str = 'llama') -> Recording:
    """The numbers of the small model on one device."""
    return recorded(small(name))


def with_fault(config: Config, path: tuple[str, ...], size: float) -> nnx.State:
    """The parameters of the seed, one number of which, of the last layer, is larger by `size`."""
    params = from_seed(config)
    parameter = functools.reduce(lambda tree, name: tree[name], path, params)
    x = parameter.get_value()
    changed = np.array(x)
    changed[-1].flat[0] += size
    parameter.set_value(jax.device_put(changed, x.sharding))
    return params
