"""The weights of a model with its adapters added to them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import Layout


def merged(params: nnx.State, config: Config) -> nnx.State:
    """Return parameters in fp32 with each adapter added to its weight; none is frozen.

    They have the sharding of the computation. Without `lora`, the parameters are returned
    unchanged.
    """
    if config.lora is None:
        return params
    layout, scale = Layout.of(config), config.lora.scale
    flat = dict(nnx.to_flat_state(params))

    def weight(path: tuple[Any, ...], param: nnx.Variable[jax.Array]) -> jax.Array:
        declared, w = param.declared, param.get_value().astype(jnp.float32)
        if declared.is_matrix:
            w = gather(w, declared.dims, layout)
        adapter = *path[:-1], 'adapter'
        if path[-1] != 'weight' or (*adapter, 'A') not in flat:
            return w
        a, b = (flat[*adapter, which] for which in 'AB')
        letters = f'{a.declared.dims},{b.declared.dims}->{declared.dims}'.lower()
        spec = layout(declared.dims)
        product = jnp.einsum(
            letters, a.get_value(), b.get_value(), out_sharding=spec, precision='highest'
        )
        return w + scale * product

    def learned(declared: Parameter) -> Parameter:
        return dataclasses.replace(declared, is_frozen=False)

    return nnx.from_flat_state(
        (path, nnx.Param(weight(path, param), declared=learned(param.declared)))
        for path, param in flat.items()
        if not param.declared.is_adapter
    )
