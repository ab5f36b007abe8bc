"""ZeRO stages (Rajbhandari et al., 2020), `optim.shard`: which device stores what, and when.

Between steps each data shard stores its part of every matrix, in fp32, and of AdamW's moments.

- `optimizer` (ZeRO-1, Megatron's distributed optimizer): a step gathers the matrices once, in the
  compute dtype, and reduce-scatters their gradients in fp32 once, after the last microbatch.
- `gradients` (ZeRO-2): each microbatch reduce-scatters each layer's gradients where its backward
  pass computes them, so that only shards of gradients accumulate.
- `weights` (ZeRO-3, FSDP): the matrices of a layer are also gathered only where it uses them,
  forward and again backward.

Vectors, learned positions, token types, routers and adapters are small and stay replicated; the
embedding and the head are matrices. With `mesh.replicas` (HSDP) all of this happens inside each
group of data shards, and one all-reduce of the shards' gradients crosses the groups once a step.
"""

import math
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dtype_at_rest
from megajax.core.model import zero_sharding
from megajax.core.model.computation import Computation
from megajax.core.model.fp8 import cast
from megajax.core.model.fp32_gradients import separate
from megajax.core.model.overlap.per_layer_arrays import Stack, apart, together
from megajax.core.model.parameters import map_parameters, trainable
from megajax.core.model.shard_copies import copied_dims, copy_to_shards, dims_of_shard
from megajax.core.model.zero_sharding import reduced_in_backward
from megajax.core.parallel.layout import Axes, Layout
from megajax.core.train import routing, scaling
from megajax.core.train.loss_scale import LossScale


def between_steps(params: Any, config: Config) -> Any:
    """Return the parameters in their stored sharding and dtype."""
    layout = Layout.of(config)

    def keep(declared: Parameter, x: jax.Array) -> jax.Array:
        x = x.astype(dtype_at_rest(declared, config))
        is_scattered = declared.is_matrix and bool(layout.at_rest)
        return zero_sharding.scatter(x, declared.dims, layout) if is_scattered else x

    return map_parameters(keep, params)


def gather_once(params: Any, config: Config, layout: Layout) -> Any:
    """Gather over `data`, in the compute dtype, the matrices that a step gathers only once.

    With ZeRO-3, the other matrices are returned unchanged; a step gathers them where it uses them.
    """
    shard, dtype, overlap = config.optim.shard, config.train.compute_dtype, config.overlap

    def gathered(declared: Parameter, x: jax.Array) -> Stack:
        is_whole = shard == 'none' and declared.owner == 'decoder'
        is_ahead = overlap.gathers_ahead and declared.is_stacked
        is_gathered_later = (shard == 'weights' or is_ahead) and declared.is_in_microbatches
        if not declared.is_matrix or is_gathered_later:
            return x
        weight = x if is_whole else zero_sharding.gather(cast(x, dtype), declared.dims, layout)
        if not overlap.is_apart or not declared.is_stacked:
            return weight
        return tuple(cast(of_layer, dtype) for of_layer in apart(weight))

    with jax.named_scope('parameters'):
        weights = map_parameters(gathered, params)
    if overlap.has_head:
        weights['head'] = params['head']
    elif overlap.is_apart:  # otherwise each microbatch casts the head
        is_tied = config.model.tie_embeddings
        parent, name = (weights['embedding'], 'table') if is_tied else (weights, 'head')
        parent[name] = parent[name].replace(cast(parent[name].get_value(), dtype))
    return weights


class StepWeights(NamedTuple):
    """The parameters of a step as `fp32_gradients.separate` returns them, copied for each shard.

    For matrices whose gradients the backward pass sums over `data`, the primals are the stored
    shards; for other parameters, they are gradient slots. Frozen parameters are only among the
    weights. With fp8, the weights have the scales of each matmul, and the primals have its counts.
    """

    weights: Any | None  # weights to compute with, or None if they are the primals
    primals: Any  # tree to differentiate with respect to
    narrow: Any  # the parameters; with fp8, their matrices are in FP8

    @classmethod
    def of(
        cls,
        params: Any,
        config: Config,
        layout: Layout,
        scales: jax.Array | None = None,
        load: routing.Load | None = None,
        loss_scale: LossScale | None = None,
    ) -> Self:
        """Return the parameters as a step uses them; without `scales`, fp8 computes in bf16.

        `load` is given with experts.
        """
        is_fp8, shard = config.train.dtype == 'fp8', config.overlap.shard
        if config.train.has_current_scales:
            scales = scaling.current(params, config, layout)
        narrow = scaling.narrowed(params, scales, config) if is_fp8 else params
        gathered = gather_once(narrow, config, layout)
        weights, primals = separate(gathered)
        if config.model.has_frozen:
            weights, params, primals = gathered, trainable(params), trainable(primals)
        if shard in ('gradients', 'weights'):

            def choose(declared: Parameter, x: jax.Array, slot: jax.Array) -> jax.Array:
                return x if reduced_in_backward(declared, shard) else slot

            weights, primals = gathered, map_parameters(choose, params, primals)
        if is_fp8:
            weights, primals = scaling.attached(
                weights,
                primals,
                scales,
                config.model,
                layout,
                is_current=config.train.has_current_scales,
            )
        if load is not None:
            weights = gathered if weights is None else weights
            given = weights, primals, load, loss_scale, config, layout
            weights, primals = routing.attached(*given)
        weights, primals = copy_to_shards(weights, layout), copy_to_shards(primals, layout)
        # With pipeline stages, each data shard already has only its own experts.
        if layout.mesh_axes('X') and not layout.mesh_axes('L'):
            primals = of_own_experts(primals, shard, layout)
        return cls(weights, primals, narrow)


def of_own_experts(primals: Any, shard: str, layout: Layout) -> Any:
    """Return the primals with slots for the gradients of a data shard's own experts.

    The shards along `expert` have different experts, and each one computes the gradients of its own
    experts from the tokens of all these shards. With ZeRO-2 and ZeRO-3, these slots are made where
    they are used instead.
    """

    def own(declared: Parameter, x: jax.Array) -> jax.Array:
        if reduced_in_backward(declared, shard) or not declared.is_of_experts:
            return x
        shape, spec = layout.of_own_experts(x.shape, copied_dims(declared, layout))
        return jnp.zeros(shape, jnp.float32, out_sharding=spec)

    return map_parameters(own, primals)


def mapped_axes(primals: Any, shard: str) -> Any:
    """Return the dim of data shards in each gradient, or None if the backward pass sums it away."""

    def axis(declared: Parameter, _: jax.Array) -> int | None:
        return None if reduced_in_backward(declared, shard) else 0

    return map_parameters(axis, primals)


def zero_gradients(primals: Any, shard: str, layout: Layout) -> Any:
    """Return zeros to accumulate the gradients of a step's microbatches in.

    The zeros are [data shard, ...], with the dims of `Layout.mapped`. Gradients that the backward
    pass sums over `data` are sharded like the stored matrices, for each replica.
    """

    def zeros(declared: Parameter, x: Stack) -> Stack:
        if isinstance(x, tuple):
            spec = layout.stacked(declared.dims_of_layer, layout.mapped)
            shape = *layout.sizes_of(layout.mapped), *x[0].shape
            return tuple(jnp.zeros(shape, of_layer.dtype, out_sharding=spec) for of_layer in x)
        is_summed = reduced_in_backward(declared, shard)
        stack = layout.mapped[:-1] if is_summed else layout.mapped
        dims = declared.dims if is_summed else dims_of_shard(declared, layout)
        spec = layout.stacked(dims, stack, at_rest=is_summed)
        return jnp.zeros((*layout.sizes_of(stack), *x.shape), x.dtype, out_sharding=spec)

    return map_parameters(zeros, primals)


def sum_over_data(gradients: Any, computation: Computation, layout: Layout) -> Any:
    """Return the sum of gradients like `zero_gradients`, with the sharding of their parameters.

    Over `data`, this is an all-reduce, or a reduce-scatter if the parameter is sharded over `data`.
    Over `replica`, it is an all-reduce of the result. The gradients of parameters outside the
    layers have one more data shard for each pipeline stage.
    """
    shard, dtype = computation.overlap.shard, computation.reduce_dtype

    def add(declared: Parameter, gradients: Stack) -> jax.Array:
        gradient = together(gradients, axis=len(layout.mapped))
        dims = copied_dims(declared, layout)
        if declared.owner == 'encoder':
            return _sum_over_images(gradient, declared, layout, dtype)
        is_done = reduced_in_backward(declared, shard)
        if layout.mesh_axes('X') and declared.is_of_experts and not is_done:
            to = dtype if declared.is_matrix else jnp.float32
            replicas, at_rest = layout.mapped[:-1], declared.is_matrix
            gradient = zero_sharding.sum_of_own_experts(
                gradient, dims, layout, to, replicas, at_rest=at_rest
            )
            return _sum_over_replicas(gradient, dims, layout, to, at_rest=at_rest)
        if not declared.is_matrix:
            return zero_sharding.sum_of_vector(gradient, dims, shards_of(declared, layout), layout)
        if not is_done:
            gradient = zero_sharding.reduce(gradient, dims, layout, dtype, layout.mapped[:-1])
        return _sum_over_replicas(gradient, dims, layout, dtype)

    return map_parameters(add, gradients)


def shards_of(declared: Parameter, layout: Layout) -> tuple[Axes, ...]:
    """Return the mesh axes of each dim of shards over which a parameter's gradients are summed."""
    *replicas, data = layout.mapped
    stages = () if declared.is_stacked else layout.mesh_axes('L')
    return *replicas, (*stages, *data)


def _sum_over_images(
    gradient: jax.Array, declared: Parameter, layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """Sum gradients [*data shards, image shard, *dims] to the parameter's stored sharding."""
    dims, shards = declared.dims, len(layout.mapped)
    if not declared.is_matrix:
        every = *layout.mapped, layout.mesh_axes(declared.summed)
        return zero_sharding.sum_of_vector(gradient, dims, every, layout)
    dtype = zero_sharding.dtype_of_sum(dtype, math.prod(gradient.shape[: shards + 1]))
    padded = zero_sharding.pad(gradient.astype(dtype), '-' * (shards + 1) + dims, layout)
    # The sum over images comes first, so that the sums over `data` are of a part of the matrix
    # only.
    of_images = layout.at_rest_over(layout.mesh_axes(declared.summed))
    spec = of_images.stacked(dims, layout.mapped, at_rest=True)
    of_data = lax.reduce_sum(padded, (shards,), out_sharding=spec)
    spec = layout.stacked(dims, layout.mapped[:-1], at_rest=True)
    of_replicas = lax.reduce_sum(of_data, (shards - 1,), out_sharding=spec)
    return _sum_over_replicas(of_replicas, dims, layout, dtype).astype(jnp.float32)


def _sum_over_replicas(
    gradient: jax.Array, dims: str, layout: Layout, dtype: DTypeLike, *, at_rest: bool = True
) -> jax.Array:
    """Sum arrays [replica, *dims] over replicas, if there are several.

    By default, the arrays are stored shards.
    """
    if len(layout.mapped) == 1:
        return gradient
    spec = layout(dims, at_rest=at_rest)
    return lax.reduce_sum(gradient.astype(dtype), (0,), out_sharding=spec).astype(jnp.float32)
