"""Copy parameters, or their gradients, to the host, one array per layer."""

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from flax import nnx

from megajax.analysis.compare.site_names import LAYERS, backward_order
from megajax.core.config import Config, ModelConfig
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.layers import layers_of
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.placements import parameter_name


def by_layer(params: nnx.State, config: Config) -> dict[str, np.ndarray]:
    """Return parameters by name, in the order of a backward pass, without padding.

    `params` are sharded as they are stored between steps, on the current mesh.
    """
    layout = Layout.of(config)
    arrays = dict[str, np.ndarray]()
    leaves = jax.tree_util.tree_leaves_with_path(
        params, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, variable in leaves:
        x = _unpadded(variable, config, layout)
        arrays |= _of_layers(parameter_name(path), x, variable.declared, layout, config.model)
    order = partial(backward_order, norms_inputs=config.model.norms_inputs)
    return {name: arrays[name] for name in sorted(arrays, key=order)}


def digests(params: nnx.State, config: Config) -> dict[str, str]:
    """Return the SHA-256 of each parameter that `by_layer` returns."""
    return {name: sha256(x.data).hexdigest() for name, x in by_layer(params, config).items()}


def _unpadded(variable: Any, config: Config, layout: Layout) -> np.ndarray:
    """Return an array in fp32 without the padding of its shards and of the vocabulary."""
    declared: Parameter = variable.declared
    sizes = layout.unpadded(declared.dims) if declared.is_matrix else (None,) * len(declared.dims)
    kept = tuple(
        slice(config.model.vocab_size if letter == 'V' else size)
        for letter, size in zip(declared.dims, sizes, strict=True)
    )
    return np.ascontiguousarray(np.asarray(variable.get_value())[kept], np.float32)


def _of_layers(
    name: str, x: np.ndarray, declared: Parameter, layout: Layout, model: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    if not (declared.is_stacked and name.startswith(LAYERS)):
        yield name, x
        return
    layers = layers_of(model, declared.dims[0])
    for place, of_layer in zip(layout.layer_order(len(x)), x, strict=True):
        yield f'{LAYERS}{layers[place]}.{name.removeprefix(LAYERS)}', of_layer
