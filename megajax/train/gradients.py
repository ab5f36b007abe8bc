"""Loss and gradients of a batch, with the same numbers on every mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.config import Config
from megajax.config.overlap_rules import resolved
from megajax.miscompiles import mesh_target
from megajax.model.shard_copies import add_copies, copy_to_shards
from megajax.parallel.layout import Layout
from megajax.parallel.stages import over_shards
from megajax.train.feed import Batch
from megajax.train.loss_scale import LossScale, scale_weights, unscale
from megajax.train.microbatches import split, with_weights
from megajax.train.objective import Objective, Sums
from megajax.train.pipeline import pipelined
from megajax.train.zero import mapped_axes, sum_over_data, weights_and_primals, zero_gradients

# Of (params, weights, microbatches, key of dropout): sums, and gradients like `zero_gradients`.
OfMicrobatches = Callable[[Any, Any, Batch, jax.Array], tuple[Sums, Any]]


def make_loss_and_gradients(config: Config) -> Callable[..., tuple[Sums, nnx.State]]:
    """Return a function of parameters, batch, dropout key and loss scale.

    It returns the mean loss, the mean negative log-likelihood and the gradient of the loss. Every
    data shard differentiates the loss of its own rows with respect to the shared parameters, which
    gives one gradient per data shard; their sum, after the last microbatch, is a step's only
    reduction over `data`. From ZeRO-2 on (`zero.py`) the backward pass sums those of matrices.
    """
    config = resolved(config, on_gpu=mesh_target() != 'cpu')
    layout = Layout.of(config)
    of_microbatches = (
        pipelined(config, layout) if config.mesh.stages > 1 else _accumulated(config, layout)
    )

    def loss_and_gradients(
        params: nnx.State, batch: Batch, key: jax.Array, loss_scale: LossScale | None = None
    ) -> tuple[Sums, nnx.State]:
        batch = scale_weights(loss_scale, with_weights(batch, config, layout))
        weights, primals = weights_and_primals(params, config, layout)
        weights, primals = copy_to_shards(weights, layout), copy_to_shards(primals, layout)
        microbatches = jax.tree.map(lambda x: split(x, config.train.microbatches, layout), batch)
        sums, gradients = of_microbatches(primals, weights, microbatches, key)
        with jax.named_scope('data_parallel'):
            sums = jax.tree.map(lambda x: x.sum(), sums)
            gradients = add_copies(sum_over_data(gradients, config, layout), layout)
        return unscale(loss_scale, (sums, gradients))

    return loss_and_gradients


def _accumulated(config: Config, layout: Layout) -> OfMicrobatches:
    """Return a function that takes one microbatch after the other."""
    differentiate = jax.value_and_grad(Objective.of(config, layout), has_aux=True)

    def of_microbatches(
        primals: Any, weights: Any, microbatches: Batch, key: jax.Array
    ) -> tuple[Sums, Any]:
        # This closes over the matrices at rest: jax refuses arguments of a mapped function that
        # are sharded over the mesh axis that it is mapped over.
        def of_shard(shard: Batch) -> tuple[Sums, Any]:
            return differentiate(primals, weights, shard, key)

        of_microbatch = over_shards(of_shard, layout, out_axes=(0, mapped_axes(primals, config)))

        def accumulate(total: Any, microbatch: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_microbatch(microbatch)), None

        if config.train.microbatches == 1:
            return of_microbatch(jax.tree.map(lambda x: x[0], microbatches))
        shards = layout.mapped
        zero = jnp.zeros(layout.sizes_of(shards), out_sharding=layout.stacked('', shards))
        zeros = (zero, zero), zero_gradients(primals, config, layout)
        total, _ = lax.scan(accumulate, zeros, microbatches)
        return total

    return of_microbatches
