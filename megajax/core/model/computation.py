"""The settings of a forward and backward pass, and the parameters as its matmuls take them."""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from megajax.core.config import Config
from megajax.core.config.overlap_rules import Overlap
from megajax.core.counts.declaration import Parameter
from megajax.core.model import zero_sharding
from megajax.core.model.fp8 import cast, is_fp8
from megajax.core.model.fp32_gradients import pair, value
from megajax.core.model.parameters import map_parameters
from megajax.core.model.zero_sharding import gather, reduced_in_backward
from megajax.core.parallel.layout import Layout


class Computation(NamedTuple):
    """The settings of a forward and backward pass, which no parameter depends on."""

    dtype: str = 'float32'
    recompute: str = 'none'  # in the backward pass: none, selective (attention's core) or full
    overlap: Overlap = Overlap()
    reduce_dtype: str = 'float32'  # of gradients summed over `data` in the backward pass
    exchange: str | None = None  # how context shards exchange keys and values, if there are several

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the settings of a run's steps on the current mesh."""
        mesh = config.mesh
        return cls(
            config.train.compute_dtype,
            config.train.recompute,
            config.overlap,
            config.optim.reduce_dtype,
            mesh.context_exchange if mesh.context > 1 else None,
        )

    def pair(self, weights: Any, params: Any, layout: Layout) -> Any:
        """Return the parameters, of a layer or outside the layers, in the form that matmuls take.

        If `params` are gradient slots or ZeRO-sharded matrices, `weights` are the weights to
        compute with.
        """
        if weights is None:
            return params

        def join(declared: Parameter, x: jax.Array, weight: Any) -> Any:
            if not reduced_in_backward(declared, self.overlap.shard):
                return pair(declared, weight, x)
            dims, stored = declared.dims_of_layer, weight if is_fp8(weight) else x
            if self.overlap.shard == 'weights':
                # Full recomputation gathers a weight once, for itself and for the backward pass.
                # Without it, a weight that is gathered here would be saved from the forward pass
                # on.
                is_kept = self.recompute != 'full'
                weight = None if is_kept else gather(cast(stored, self.dtype), dims, layout)
            if declared.is_frozen:
                return zero_sharding.without_slot(x, weight)
            slotted = zero_sharding.slotted(x, weight, dims, layout, self.reduce_dtype)
            return replace(slotted, weight=stored) if slotted.at_rest else slotted

        return map_parameters(join, params, weights)

    def value(self, weight: jax.Array, x: jax.Array, declared: Parameter, layout: Layout) -> Any:
        """Return a parameter outside the layers in fp32, rounded as its weight is.

        Its gradient becomes the gradient of x, which is a gradient slot or a ZeRO-sharded matrix.
        """
        is_reduced = reduced_in_backward(declared, self.overlap.shard)
        if is_reduced and self.overlap.shard == 'weights':
            weight = gather(x.astype(self.dtype), declared.dims, layout)
        if declared.is_frozen:
            return weight.astype(jnp.float32)
        if not is_reduced:
            return x if weight.dtype == x.dtype else value(weight, x)
        slotted = zero_sharding.slotted(x, weight, declared.dims, layout, self.reduce_dtype)
        return value(weight, slotted.slot)


IN_FP32 = Computation()
