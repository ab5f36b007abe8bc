"""The collectives of data parallelism, by ZeRO stage.

Megatron-Core has the same stages (`data_parallel_sharding_strategy` of its FSDP): `optim` is
ZeRO-1, `optim_grads` ZeRO-2, `optim_grads_params` ZeRO-3. Its HSDP adds one all-reduce between the
groups. Weights are gathered in the compute dtype. Gradients of matrices are summed in
`optim.reduce_dtype`. Vectors, positions, token types, routers and adapters are replicated, and
their gradients are summed in fp32. Context shards have the same weights and different tokens, so
all of this runs over `data` and `context` together, as in Megatron
(`parallel_state.get_data_parallel_group(with_context_parallel=True)`).
"""

import dataclasses
from collections.abc import Iterator
from math import prod

from megajax.core.config import Config
from megajax.core.counts.collective import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    axes_text,
)
from megajax.core.counts.parameters import Counts, megatron_counts, own_counts
from megajax.core.counts.product import Phase
from megajax.xla.hlo.program import Array

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


# The mesh axes whose devices have the same weights in a replica, except for the weights of experts,
# which differ along `expert`.
SHARDS = 'data', 'expert', 'context'
SHARDS_OF_EXPERTS = 'data', 'context'


def over_data(
    config: Config,
    counts: Counts | None = None,
    axes: tuple[str, ...] = SHARDS,
    *,
    learned: Counts | None = None,
) -> Iterator[Expected]:
    """Yield the collectives over `data`, `expert`, `context` and `replica`.

    `counts` are the parameters of a device without data parallelism, by default as Megatron shards
    them, and `learned` the parameters with gradients. Within a replica, the devices along `axes`
    have the same parameters.
    """
    sizes = config.mesh.sizes
    if counts is None and config.mesh.experts > 1:
        for of_experts, shards in groups(config):
            every, own = (
                _counts(config, learned=only, of_experts=of_experts) for only in (False, True)
            )
            yield from over_data(config, every, shards, learned=own)
        return
    group = _Group(config, axes, prod(sizes.get(axis, 1) for axis in axes))
    if group.size * config.mesh.replicas == 1:
        return
    every = counts or _counts(config, learned=False)
    learned = learned or counts or _counts(config, learned=True)
    if config.optim.shard == 'none':
        if learned.all:
            yield group.sum_replicated(learned.all)
        return
    yield from group.gathers(every)
    yield from group.scatters(learned)
    if config.mesh.replicas > 1:
        yield group.sum_over_replicas(learned.matrices)
    if vectors := learned.all - learned.matrices:
        yield group.sum_replicated(vectors)


def groups(config: Config) -> Iterator[tuple[bool | None, tuple[str, ...]]]:
    """Yield each kind of parameters (`count`'s `of_experts`) and the axes that replicate it."""
    if config.mesh.experts == 1:
        yield None, SHARDS
    else:
        yield False, SHARDS
        yield True, SHARDS_OF_EXPERTS


def _counts(config: Config, *, learned: bool, of_experts: bool | None = None) -> Counts:
    if config.mesh.is_grid:
        return own_counts(config, learned=learned)
    return megatron_counts(
        config.model,
        config.mesh.model,
        learned=learned,
        experts=config.mesh.experts,
        of_experts=of_experts,
    )


@dataclasses.dataclass(frozen=True)
class _Group:
    """Devices of a replica with the same parameters, which ZeRO shards among them."""

    config: Config
    axes: tuple[str, ...]
    size: int

    def gathers(self, counts: Counts) -> Iterator[Expected]:
        """Yield the all-gathers of weights.

        ZeRO-3 gathers a layer's weights before its forward pass, and again for its backward pass,
        which shares them with recomputation. It gathers the tables once in each microbatch.
        """
        if self.config.optim.shard != 'weights':
            yield from self._send(GATHER, 'step', counts.matrices, 1)
            return
        often, runs = counts.layers + counts.tables, self.config.train.microbatches
        yield from self._send(GATHER, 'forward', often, runs)
        yield from self._send(GATHER, 'forward', counts.matrices - often, 1)
        yield from self._send(GATHER, 'backward', counts.layers, runs)

    def scatters(self, counts: Counts) -> Iterator[Expected]:
        """Yield the reduce-scatters of the gradients of matrices."""
        if self.config.overlap.shard == 'optimizer':
            yield from self._send(SCATTER, 'step', counts.matrices, 1)
            return
        often, runs = counts.layers + counts.tables, self.config.train.microbatches
        yield from self._send(SCATTER, 'backward', often, runs)
        yield from self._send(SCATTER, 'backward', counts.matrices - often, 1)

    def _send(self, kind: str, phase: Phase, count: int, times: int) -> Iterator[Expected]:
        """Yield the gather of weights or the scatter of gradients; nothing without elements."""
        if count and self.size > 1:
            is_gather = kind == GATHER
            name, source = ('parameters', 'gather') if is_gather else ('gradients', 'sum')
            dtype = HLO_DTYPES[self.config.train.dtype] if is_gather else self._reduce_dtype
            source = SOURCES[f'{source} once' if phase == 'step' else source]
            site, array = self._site(name, phase), Array(dtype, (self._padded(count),))
            yield Expected.over(self.config, site, kind, array, times, source)

    def sum_over_replicas(self, count: int) -> Expected:
        """Return the all-reduce of a shard's gradients of matrices, between the groups of HSDP."""
        array = Array(self._reduce_dtype, (self._padded(count) // self.size,))
        site, source = Site('gradients', 'step', 'replica'), SOURCES['sum over replicas']
        return Expected.over(self.config, site, REDUCE, array, 1, source)

    def sum_replicated(self, count: int) -> Expected:
        """Return the sum of replicated parameters' gradients, over replicas and shards at once."""
        site, array = self._site('gradients', 'step', 'replica'), Array('f32', (count,))
        return Expected.over(self.config, site, REDUCE, array, 1, SOURCES['sum once'])

    def _site(self, name: str, phase: Phase, *others: str) -> Site:
        return Site(name, phase, axes_text(self.config, *others, *self.axes))

    def _padded(self, count: int) -> int:
        return with_padding(self.config, count, self.size)

    @property
    def _reduce_dtype(self) -> str:
        return HLO_DTYPES[self.config.optim.reduce_dtype]


def with_padding(config: Config, count: int, shards: int | None = None) -> int:
    """Return the elements of `count` in matrices with padding that makes D divisible by `shards`.

    By default `shards` is the number of data and context shards. Each matrix has D once. Megatron
    pads its buckets instead (`_ParamAndGradBuffer`), by less than one element for each shard.
    """
    size = config.model.hidden_size
    padding = -size % (shards or config.mesh.data_shards * config.mesh.context)
    return count // size * (size + padding) if padding else count
