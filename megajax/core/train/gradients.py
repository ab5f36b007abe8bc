"""Loss and gradients of a batch, with the same numbers on every mesh."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.config import Config
from megajax.core.config.overlap_rules import resolved, resolved_for
from megajax.core.hardware.targets import GPUS
from megajax.core.model.overlap.per_layer_arrays import added, holds_totals, with_totals
from megajax.core.model.shard_copies import add_copies
from megajax.core.parallel.layer_order import small_in_model_order, small_on_stages
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.pipeline_ops import over_shards
from megajax.core.train import routing, scaling
from megajax.core.train.feed import Batch
from megajax.core.train.loss_scale import LossScale, scale_weights, unscale
from megajax.core.train.microbatches import check_arrays, split, with_weights
from megajax.core.train.objective import Objective, Sums
from megajax.core.train.pipeline import pipelined
from megajax.core.train.zero import StepWeights, mapped_axes, sum_over_data, zero_gradients
from megajax.xla.miscompiles import mesh_target

# A function of (params, weights, microbatches, dropout key). It returns the sums, and gradients
# like `zero_gradients`.
OfMicrobatches = Callable[[Any, Any, Batch, jax.Array], tuple[Sums, Any]]


class Seen(NamedTuple):
    """Values that a step records in addition to its loss."""

    # With fp8, the indices of the largest exponents (`scaling.py`); found in bf16 without scales.
    places: jax.Array | None
    routed: jax.Array | None  # the sums of routers' statistics, with experts (`routing.py`)


def make_gradients(config: Config) -> Callable[..., tuple[Sums, nnx.State, Seen]]:
    """Return a function of parameters, batch, dropout key, loss scale, scales and load.

    The scales are for fp8, and the load is the load of experts in the step before. The function
    returns the mean loss and the mean negative log-likelihood, the gradient of the loss, and the
    values in `Seen`.

    Every data shard differentiates the loss of its own sequences with respect to the shared
    parameters, which gives one gradient per data shard. Their sum, after the last microbatch, is a
    step's only reduction over `data`. From ZeRO-2 on (`zero.py`) the backward pass reduces the
    gradients of matrices.
    """
    layout, on_gpu = Layout.of(config), mesh_target() in GPUS
    usual = resolved(config, on_gpu=on_gpu)

    def loss_and_gradients(
        params: nnx.State,
        batch: Batch,
        key: jax.Array,
        loss_scale: LossScale | None = None,
        scales: jax.Array | None = None,
        load: jax.Array | None = None,
    ) -> tuple[Sums, nnx.State, Seen]:
        check_arrays(batch, config)
        rows, length = batch['tokens'].shape
        is_usual = (rows, length) == (config.train.batch_size, config.train.seq_len)
        chosen = usual if is_usual else resolved_for(config, rows, length, on_gpu=on_gpu)
        objective = Objective.of(chosen, layout)
        make = pipelined if config.mesh.stages > 1 else _accumulated
        batch = scale_weights(loss_scale, with_weights(batch, chosen, layout))
        load = routing.init_load(config) if load is None else load
        of_experts = None if load is None else routing.Load.of(load, batch, config.train)
        scales = None if scales is None else small_on_stages(scales, layout)
        given = params, chosen, layout, scales, of_experts, loss_scale
        weights, primals, narrow = StepWeights.of(*given)
        microbatches = jax.tree.map(lambda x: split(x, config.train.microbatches, layout), batch)
        sums, gradients = make(objective, layout)(primals, weights, microbatches, key)
        gradients, routed = routing.detached(gradients, layout)
        gradients, counts = scaling.detached(gradients, config.model)
        with jax.named_scope('data_parallel'):
            sums = jax.tree.map(lambda x: x.sum(), sums)
            gradients = add_copies(sum_over_data(gradients, objective.computation, layout), layout)
            seen = counts, narrow, scales, layout, config.model
            places = None
            if counts:
                places = small_in_model_order(scaling.largest(*seen), layout)
        return *unscale(loss_scale, (sums, gradients)), Seen(places, routed)

    return loss_and_gradients


def make_loss_and_gradients(config: Config) -> Callable[..., tuple[Sums, nnx.State]]:
    """Return a function like that of `make_gradients`, but without the last result."""
    of_all = make_gradients(config)

    def loss_and_gradients(*args: Any) -> tuple[Sums, nnx.State]:
        sums, gradients, _ = of_all(*args)
        return sums, gradients

    return loss_and_gradients


def _accumulated(objective: Objective, layout: Layout) -> OfMicrobatches:
    """Return a function that accumulates the microbatches one after the other."""
    differentiate = jax.value_and_grad(objective, has_aux=True)
    shard = objective.computation.overlap.shard

    def of_microbatches(
        primals: Any, weights: Any, microbatches: Batch, key: jax.Array
    ) -> tuple[Sums, Any]:
        # This closes over the ZeRO-sharded matrices: jax rejects arguments of a mapped function
        # that are sharded over the mesh axis over which it is mapped.
        def of_shard(shard: Batch, totals: Any) -> tuple[Sums, Any]:
            slots = primals if totals is None else with_totals(primals, totals)
            return differentiate(slots, weights, shard, key)

        axes, is_added = mapped_axes(primals, shard), holds_totals(primals, weights)
        in_axes = 0, axes if is_added else None
        of_microbatch = over_shards(of_shard, layout, in_axes, out_axes=(0, axes))

        def accumulate(total: tuple[Sums, Any], microbatch: Batch) -> tuple[Any, None]:
            sums, totals = total
            new_sums, gradients = of_microbatch(microbatch, totals if is_added else None)
            add = added if is_added else partial(jax.tree.map, jnp.add)
            return (jax.tree.map(jnp.add, sums, new_sums), add(totals, gradients)), None

        if objective.config.train.microbatches == 1:
            return of_microbatch(jax.tree.map(lambda x: x[0], microbatches), None)
        shards = layout.mapped
        zero = jnp.zeros(layout.sizes_of(shards), out_sharding=layout.stacked('', shards))
        zeros = (zero, zero), zero_gradients(primals, shard, layout)
        total, _ = lax.scan(accumulate, zeros, microbatches)
        return total

    return of_microbatches
