"""Arrays of parameters, made from their declarations (`core/counts/parameters.py`)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from megajax.core.config import ModelConfig
from megajax.core.counts.declaration import Declared, Parameter
from megajax.core.counts.parameters import declare, dim_sizes, shape_of
from megajax.core.counts.vision_parameters import declare_vision, in_model, vision_sizes
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The declarations, sizes and layout from which a module makes its parameters."""

    declared: Declared
    sizes: Mapping[str, int]
    layout: Layout
    is_of_encoder: bool = False
    adapter_scale: float = 0.0  # the factor of the adapters' outputs

    @classmethod
    def of(cls, model: ModelConfig, layout: Layout) -> 'Parameters':
        """Return the parameters of a complete model."""
        scale = model.lora.scale if model.lora else 0.0
        return cls(declare(model), dim_sizes(model), layout, adapter_scale=scale)

    @classmethod
    def of_encoder(cls, model: ModelConfig, declared: Declared | None = None) -> 'Parameters':
        """Return the parameters of a model's vision encoder; no mesh axis shards them.

        Their dims have letters of the encoder's own. `declared` replaces them with other
        parameters, which have the same shardings.
        """
        assert model.vision is not None
        declared = declared or declare_vision(model.vision, model.frozen_image_parts)
        return cls(declared, vision_sizes(model), Layout(), is_of_encoder=True)

    def __contains__(self, name: str) -> bool:
        return name in self.declared

    def __getitem__(self, name: str) -> 'Parameters':
        """Return the parameters of the submodule with this name."""
        declared = self.declared[name]
        assert not isinstance(declared, Parameter)
        return dataclasses.replace(self, declared=declared)

    def dims(self, name: str) -> str:
        """Return the dims of a parameter within one layer."""
        declared = self.declared[name]
        assert isinstance(declared, Parameter)
        return declared.dims_of_layer

    def make(self, name: str, key: jax.Array | None = None) -> nnx.Param[jax.Array]:
        """Make a parameter in fp32, sharded on the current mesh; no value depends on the mesh.

        Inside `jax.vmap` over the layers or over DeepStack's mergers, it makes the parameter of one
        of them.
        """
        declared = self.declared[name]
        assert isinstance(declared, Parameter)
        dims = declared.dims_of_layer
        shape, spec = shape_of(dims, self.sizes), self.layout(dims)
        if declared.std:
            assert key is not None
            value = declared.std * jax.random.normal(key, shape, jnp.float32, out_sharding=spec)
        else:
            value = jnp.full(shape, declared.value, jnp.float32, out_sharding=spec)
        return nnx.Param(value, declared=in_model(declared) if self.is_of_encoder else declared)

    def maybe(self, name: str) -> nnx.Param[jax.Array] | None:
        """Make a parameter that needs no random key; return None if it is not declared."""
        return self.make(name) if name in self else None


def map_parameters(function: Callable[..., Any], params: Any, *others: Any) -> Any:
    """Apply `function(declared, x, ...)` to each parameter x; `others` are trees like `params`."""

    def apply(param: nnx.Variable[jax.Array], *rest: Any) -> nnx.Variable[jax.Array]:
        rest = tuple(x.get_value() if isinstance(x, nnx.Variable) else x for x in rest)
        return param.replace(function(param.declared, param.get_value(), *rest))

    return jax.tree.map(apply, params, *others, is_leaf=lambda x: isinstance(x, nnx.Variable))


def trainable(params: nnx.State) -> nnx.State:
    """Return the parameters that are not frozen; `with_frozen` adds the others."""
    return nnx.filter_state(params, lambda _, param: not param.declared.is_frozen)


def with_frozen(params: nnx.State, others: nnx.State) -> nnx.State:
    """Return parameters together with the frozen parameters of `others`."""
    frozen = nnx.filter_state(others, lambda _, param: param.declared.is_frozen)
    return nnx.merge_state(params, frozen)


def cast_matrices(params: Any, dtype: DTypeLike, layout: Layout) -> Any:
    """Cast each matrix to `dtype`, and gather it to the sharding of the computation."""

    def cast(declared: Parameter, x: jax.Array) -> jax.Array:
        return gather(x.astype(dtype), declared.dims, layout) if declared.is_matrix else x

    return map_parameters(cast, params)
