"""The settings of a forward and backward pass, and the parameters as its products take them."""

from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from megajax.core.config import Config
from megajax.core.config.overlap_rules import gathers_ahead, rung
from megajax.core.counts.declaration import Parameter
from megajax.core.model import at_rest
from megajax.core.model.at_rest import gather, reduced_in_backward
from megajax.core.model.fp8 import cast, is_fp8
from megajax.core.model.gradient_slot import pair, value
from megajax.core.model.parameters import map_parameters
from megajax.core.parallel.layout import Layout


class Computation(NamedTuple):
    """The settings of a forward and backward pass, which no parameter depends on."""

    dtype: str = 'float32'
    recompute: str = 'none'  # in the backward pass: none, selective (attention's core) or full
    # Parts of the rows, independent within a layer: batch-split overlap (Domino).
    num_parts: int = 1
    in_order: bool = False  # whether the parts take turns (`model/overlap`), or XLA orders them
    splits_tokens: bool = False  # whether the parts are of the tokens, not of the rows
    unroll: bool = False  # whether each layer is compiled on its own, or a loop over layers
    shard: str = 'none'  # what is sharded over `data` (`overlap_rules.rung`)
    gathers_ahead: bool = False  # whether layers in order gather weights, and keep them
    has_head: bool = False  # whether layers in order gather the head, too
    reduce_dtype: str = 'float32'  # of gradients summed over `data` in the backward pass
    exchange: str | None = None  # of keys and values between context shards, if there are several

    @classmethod
    def of(cls, config: Config) -> Self:
        """The computation of a run's config, with the rows of a microbatch in one part."""
        mesh, optim = config.mesh, config.optim
        return cls(
            config.train.compute_dtype,
            config.train.recompute,
            shard=rung(config),
            gathers_ahead=gathers_ahead(config),
            reduce_dtype=optim.reduce_dtype,
            exchange=mesh.context_exchange if mesh.context > 1 else None,
        )

    def pair(self, weights: Any, params: Any, layout: Layout) -> Any:
        """Return parameters, of a layer or outside the layers, as their products take them.

        Where `params` are gradient slots or matrices at rest, `weights` are those to compute with.
        """
        if weights is None:
            return params

        def join(declared: Parameter, x: jax.Array, weight: Any) -> Any:
            if not reduced_in_backward(declared, self.shard):
                return pair(declared, weight, x)
            dims, stored = declared.dims_of_layer, weight if is_fp8(weight) else x
            if self.shard == 'weights':
                # Full recomputation gathers once for itself and for the backward pass. Otherwise
                # a weight that is gathered here would be kept from the forward pass.
                is_kept = self.recompute != 'full'
                weight = None if is_kept else gather(cast(stored, self.dtype), dims, layout)
            if declared.is_frozen:
                return at_rest.without_slot(x, weight)
            slotted = at_rest.slotted(x, weight, dims, layout, self.reduce_dtype)
            return replace(slotted, weight=stored) if slotted.at_rest else slotted

        return map_parameters(join, params, weights)

    def value(self, weight: jax.Array, x: jax.Array, declared: Parameter, layout: Layout) -> Any:
        """Return a parameter outside the layers in fp32, rounded as its weight is.

        Its gradient becomes that of x, a gradient slot or a matrix at rest.
        """
        is_reduced = reduced_in_backward(declared, self.shard)
        if is_reduced and self.shard == 'weights':
            weight = gather(x.astype(self.dtype), declared.dims, layout)
        if declared.is_frozen:
            return weight.astype(jnp.float32)
        if not is_reduced:
            return x if weight.dtype == x.dtype else value(weight, x)
        slotted = at_rest.slotted(x, weight, declared.dims, layout, self.reduce_dtype)
        return value(weight, slotted.slot)


IN_FP32 = Computation()
