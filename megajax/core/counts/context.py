"""The collectives of context parallelism, whose shards attend to each other's tokens.

Megatron leaves this to TransformerEngine, whose backward pass sums the gradients of keys and values
in the compute dtype. megajax sums them in fp32, and with a ring the sums make one more hop, back to
their own shard.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    GATHER,
    HLO_DTYPES,
    PERMUTE,
    SCATTER,
    Expected,
    Site,
    heads,
    passes,
)
from megajax.core.counts.products import Phase
from megajax.xla.hlo.program import Array

# Classes of TransformerEngine.
_FILE = 'transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py'
SOURCES = {
    'gather': f'{_FILE} AttnFuncWithCPAndKVAllGather',
    'ring': f'{_FILE} AttnFuncWithCPAndKVP2P',
}
IN_FP32 = 'gradients of keys and values are summed in fp32'


def over_context(config: Config, layers: int) -> Iterator[Expected]:
    """Yield TransformerEngine's collectives for a number of runs of a layer."""
    own = config.mesh.context_exchange == 'ring'
    yield from _exchanges(
        config,
        layers,
        dtype=HLO_DTYPES[config.train.dtype],
        hops=config.mesh.context - own,
        source=SOURCES[config.mesh.context_exchange],
    )


def own_over_context(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the collectives of `core/model/context.py`."""
    yield from _exchanges(config, layers, dtype='f32', hops=config.mesh.context, source=IN_FP32)


def _exchanges(
    config: Config, layers: int, *, dtype: str, hops: int, source: str
) -> Iterator[Expected]:
    """Yield the collectives of all passes, with sums of gradients in `dtype`.

    `hops` is how often a ring passes the sums on.
    """
    shards = config.mesh.context
    is_ring = config.mesh.context_exchange == 'ring'
    sent = keys(config)
    sums = sent._replace(dtype=dtype)

    def send(phase: Phase, kind: str, array: Array, times: int) -> Expected:
        if kind == PERMUTE:
            array = array._replace(shape=array.shape[1:])
        site, times = Site('attention', phase, 'context'), 2 * times * layers  # keys and values
        return Expected.over(config, site, kind, array, times, source)

    for phase in passes(config):
        yield send(phase, PERMUTE, sent, shards - 1) if is_ring else send(phase, GATHER, sent, 1)
        if phase == 'backward':
            yield send(phase, PERMUTE, sums, hops) if is_ring else send(phase, SCATTER, sums, 1)


def keys(config: Config) -> Array:
    """Return the keys [shard, B, S, K, H] of all context shards that a device of `model` reads.

    If devices share a head, each has a copy of it.
    """
    of_shard = heads(config, max(config.model.num_kv_heads // config.mesh.model, 1))
    return of_shard._replace(shape=(config.mesh.context, *of_shard.shape))
