"""The collectives of data parallelism: what each rung of ZeRO sends, and when.

Megatron-Core has the same rungs (`data_parallel_sharding_strategy` of its FSDP): `optim` is ZeRO-1,
`optim_grads` ZeRO-2, `optim_grads_params` ZeRO-3. Its HSDP adds one all-reduce between the groups.
Weights are gathered in the compute dtype, gradients of matrices are summed in
`optim.reduce_dtype`, and those of vectors and lookup tables, which are replicated, in fp32.
"""

from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.collective import GATHER, HLO_DTYPES, REDUCE, SCATTER, Expected, Site
from megajax.counts.parameters import Counts, megatron_counts, own_counts
from megajax.counts.products import Phase
from megajax.hlo.program import Array

# Files and functions of Megatron-Core, below megatron/core.
_BUCKETS = 'distributed/param_and_grad_buffer.py _ParamAndGradBucketGroup'
_FSDP = 'distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py'
SOURCES = {
    'gather once': f'{_BUCKETS}.start_param_sync',
    'gather': f'{_FSDP} AllGatherPipeline.async_bucket_gather',
    'sum once': f'{_BUCKETS}.start_grad_sync',
    'sum': f'{_FSDP} GradReducePipeline.reduce_gradients',
    'sum over replicas': f'{_FSDP} GradReducePipeline._bucket_group_gradient_reduce',
}


def over_data(config: Config, counts: Counts | None = None) -> Iterator[Expected]:
    """Yield the collectives over `data` and `replica`.

    `counts` are the parameters of a device without data parallelism, by default as Megatron shards
    them.
    """
    if config.mesh.data == 1:
        return
    counts = counts or (
        own_counts(config)
        if config.mesh.is_grid
        else megatron_counts(config.model, config.mesh.model)
    )
    if config.optim.shard == 'none':
        yield _sum_replicated(config, counts.all)
        return
    yield from _gathers(config, counts)
    yield from _scatters(config, counts)
    if config.mesh.replicas > 1:
        yield _sum_over_replicas(config, counts.matrices)
    yield _sum_replicated(config, counts.all - counts.matrices)


def _gathers(config: Config, counts: Counts) -> Iterator[Expected]:
    """Yield the all-gathers of weights.

    ZeRO-3 gathers a layer's weights before its forward pass, and again before its backward pass or
    its recomputation, which share them. It gathers the tables once in each microbatch.
    """
    if config.optim.shard != 'weights':
        yield from _gather(config, 'step', counts.matrices, 1)
        return
    often = counts.layers + counts.tables
    yield from _gather(config, 'forward', often, config.train.microbatches)
    yield from _gather(config, 'forward', counts.matrices - often, 1)
    yield from _gather(config, 'backward', counts.layers, config.train.microbatches)


def _gather(config: Config, phase: Phase, count: int, times: int) -> Iterator[Expected]:
    if count and config.mesh.data_shards > 1:
        yield Expected(
            site=Site('parameters', phase, 'data'),
            kind=GATHER,
            array=Array(HLO_DTYPES[config.train.dtype], (with_padding(config, count),)),
            times=times,
            size=config.mesh.data_shards,
            source=SOURCES['gather once' if phase == 'step' else 'gather'],
        )


def _scatters(config: Config, counts: Counts) -> Iterator[Expected]:
    """Yield the reduce-scatters of the gradients of matrices."""
    if config.optim.shard == 'optimizer':
        yield from _scatter(config, 'step', counts.matrices, 1)
        return
    often = counts.layers + counts.tables
    yield from _scatter(config, 'backward', often, config.train.microbatches)
    yield from _scatter(config, 'backward', counts.matrices - often, 1)


def _scatter(config: Config, phase: Phase, count: int, times: int) -> Iterator[Expected]:
    if count and config.mesh.data_shards > 1:
        yield Expected(
            site=Site('gradients', phase, 'data'),
            kind=SCATTER,
            array=Array(_reduce_dtype(config), (with_padding(config, count),)),
            times=times,
            size=config.mesh.data_shards,
            source=SOURCES['sum once' if phase == 'step' else 'sum'],
        )


def _sum_over_replicas(config: Config, count: int) -> Expected:
    """Return the all-reduce of a data shard's gradients of matrices, between the groups of HSDP."""
    shard = with_padding(config, count) // config.mesh.data_shards
    return Expected(
        site=Site('gradients', 'step', 'replica'),
        kind=REDUCE,
        array=Array(_reduce_dtype(config), (shard,)),
        times=1,
        size=config.mesh.replicas,
        source=SOURCES['sum over replicas'],
    )


def _sum_replicated(config: Config, count: int) -> Expected:
    """Return the reduction of replicated parameters' gradients, over all data shards together."""
    sizes = config.mesh.sizes
    axes = [axis for axis in ('replica', 'data') if sizes.get(axis, 1) > 1]
    return Expected(
        site=Site('gradients', 'step', '+'.join(axes)),
        kind=REDUCE,
        array=Array('f32', (count,)),
        times=1,
        size=config.mesh.data,
        source=SOURCES['sum once'],
    )


def _reduce_dtype(config: Config) -> str:
    return HLO_DTYPES[config.optim.reduce_dtype]


def with_padding(config: Config, count: int) -> int:
    """Return the elements of matrices with the padding that makes D divisible by the data shards.

    Each matrix has D once. Megatron pads its buckets instead (`_ParamAndGradBuffer`), by less than
    one element for each shard.
    """
    size = config.model.hidden_size
    padding = -size % config.mesh.data_shards
    return count // size * (size + padding) if padding else count
