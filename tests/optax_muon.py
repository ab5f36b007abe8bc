"""Muon of optax on one device, for the matrices of layers each by itself."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dim_sizes, parameters
from megajax.core.train.muon import coefficients
from megajax.core.train.optimizer import make_schedule

Arrays = Mapping[str, Any]


def split(arrays: Arrays, config: Config) -> dict[str, jax.Array]:
    """Each matrix of the layers by itself, [layer, inputs, outputs]."""
    sizes, declared, found = dim_sizes(config.model), dict(parameters(config.model)), {}
    for name, x in arrays.items():
        own = declared[name]
        if not own.is_layer_matrix:
            found[name] = jnp.asarray(x)
            continue
        rows = math.prod(sizes[letter.upper()] for letter in own.dims if letter in own.inputs)
        count = math.prod(sizes[letter] for letter in own.dims if letter in 'LX')
        for part, places in _parts(own, config).items():
            piece = x if places is None else x.take(places, _fused(own))
            found[f'{name} {part}'] = jnp.asarray(piece.reshape(count, rows, -1))
    return found


def joined(matrices: Arrays, config: Config, like: Arrays) -> dict[str, np.ndarray]:
    """The arrays that `split` has split, which have the shapes of `like`."""
    declared, found = dict(parameters(config.model)), {}
    for name, x in like.items():
        own = declared[name]
        if not own.is_layer_matrix:
            found[name] = np.asarray(matrices[name])
            continue
        parts, dim = _parts(own, config), _fused(own)
        shapes = [
            x.shape if places is None else (*x.shape[:dim], len(places), *x.shape[dim + 1 :])
            for places in parts.values()
        ]
        pieces = [
            np.asarray(matrices[f'{name} {part}']).reshape(shape)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        found[name] = np.concatenate(pieces, dim)
    return found


def _parts(declared: Parameter, config: Config) -> dict[str, list[int] | None]:
    """The matrices that an array has, and their places in the dim that holds several."""
    groups = dim_sizes(config.model)['G']
    if 'C' in declared.dims:
        return {'q': [*range(groups)], 'k': [groups], 'v': [groups + 1]}
    return {'gate': [0], 'up': [1]} if 'U' in declared.dims else {'': None}


def _fused(declared: Parameter) -> int:
    return next((place for place, dim in enumerate(declared.dims) if dim in 'CU'), 0)


def optimizer_of_optax(config: Config) -> optax.GradientTransformation:
    """Clipping, Muon for the matrices of `split`, and AdamW for the others."""
    optim, schedule = config.optim, make_schedule(config.optim, config.train.steps)
    declared = dict(parameters(config.model))
    adamw = functools.partial(optax.adamw, schedule, b1=optim.beta1, b2=optim.beta2, eps=optim.eps)
    muon = optax.contrib.muon(
        schedule,
        ns_coeffs=coefficients(optim),
        ns_steps=optim.ns_steps,
        beta=optim.momentum,
        nesterov=optim.nesterov,
        weight_decay=optim.weight_decay,
        muon_weight_dimension_numbers=lambda params: {
            name: MuonDimensionNumbers(1, 2) for name in params
        },
        consistent_rms=0.2,
    )

    def kinds(params: Any) -> dict[str, str]:
        of_others = {name: 'decays' if x.decays else 'vector' for name, x in declared.items()}
        return {name: of_others.get(name, 'muon') for name in params}

    transforms = {
        'muon': muon,
        'decays': adamw(weight_decay=optim.weight_decay),
        'vector': adamw(weight_decay=0.0),
    }
    return optax.chain(
        optax.clip_by_global_norm(optim.grad_clip), optax.partition(transforms, kinds)
    )
