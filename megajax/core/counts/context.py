"""The collectives of context parallelism, whose shards attend to each other's tokens.

Megatron leaves this to TransformerEngine, whose backward pass sums the gradients of keys and values
in the compute dtype. megajax sums them in fp32; with a ring, the sums make one more hop, back to
the shard of their keys. In layers with a sliding window, megajax sends the ends of chunks to the
neighbors, but TransformerEngine gathers all keys and values, because its ring does not support
windows.

With document masks, each step of megajax gathers the ids of all documents once. Megatron has the
lengths of documents on every rank.

An exchange of heads (Ulysses) sends queries, keys, values and output, once forward and once
backward in each layer. TransformerEngine sends the output a second time in the backward pass.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    EXCHANGE,
    GATHER,
    HLO_DTYPES,
    PERMUTE,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    heads,
    passes,
)
from megajax.core.counts.product import Phase
from megajax.core.counts.windows import Share, windows_within
from megajax.xla.hlo.program import Array

# The file and classes of TransformerEngine.
_FILE = 'transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py'
SOURCES = {
    'gather': f'{_FILE} AttnFuncWithCPAndKVAllGather',
    'ring': f'{_FILE} AttnFuncWithCPAndKVP2P',
    'all_to_all': f'{_FILE} AttnFuncWithCPAndQKVOA2A',
}
IN_FP32 = 'gradients of keys and values are summed in fp32'
ENDS = 'a window needs the ends of the neighboring chunks only'
DOCUMENTS = 'each shard needs the documents of all tokens of its sequences'
PADDING = 'each shard needs the place at which the padding of its sequences begins'


def over_context(config: Config, layers: int) -> Iterator[Expected]:
    """Yield TransformerEngine's collectives; `layers` counts the runs of a layer."""
    if config.mesh.exchanges_heads:
        yield from _heads(config, layers, sent_again=1, source=SOURCES['all_to_all'])
        return
    exchanges = dict.fromkeys(windows_within(config), 'gather')
    exchanges[None] = config.mesh.context_exchange
    for window, share in windows_within(config).items():
        yield from _exchanges(
            config,
            int(layers * share),
            exchanges[window],
            dtype=HLO_DTYPES[config.train.dtype],
            hops=config.mesh.context - 1,
            source=SOURCES[exchanges[window]],
        )


def own_over_context(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the collectives of `core/model/context*.py`."""
    if config.mesh.exchanges_heads:
        yield from _heads(config, layers)
        return
    yield from of_full_layers(config, layers)
    yield from halos(config, layers)


def of_documents(config: Config) -> Iterator[Expected]:
    """Yield the all-gather of a step's documents, or of BERT's segments (`model/documents.py`).

    Each context shard has only the ids of its own tokens. For BERT, the shards also find out which
    sequences have a masked token, and for experts, where the padding of each sequence begins.
    """
    if config.mesh.context == 1:
        return
    rows = config.microbatch_rows * config.train.microbatches
    site = Site('documents', 'step', 'context')
    if config.model.experts is not None:
        yield Expected.over(config, site, REDUCE, Array('s32', (rows,)), 1, PADDING)
    if not (config.data.document_mask or config.model.is_bert):
        return
    ids = Array('s32', (rows, config.train.seq_len))
    yield Expected.over(config, site, GATHER, ids, 1, DOCUMENTS)
    if config.model.is_bert:
        yield Expected.over(config, site, REDUCE, Array('f32', (rows,)), 1, DOCUMENTS)


def of_full_layers(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the collectives of the layers without a window."""
    count, exchange = windows_within(config).get(None, 0), config.mesh.context_exchange
    runs, hops = int(layers * count), config.mesh.context
    yield from _exchanges(config, runs, exchange, dtype='f32', hops=hops, source=IN_FP32)


def halos(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the collectives of the layers with a window.

    The end of each of a shard's two chunks is sent to a neighbor. In the backward pass, the
    gradients of the ends are sent back.
    """
    rows, _, *of_token = keys(config).shape[1:]
    for window, share in windows_within(config).items():
        if window is None:
            continue
        ends = keys(config)._replace(shape=(rows, window, *of_token))
        for phase in passes(config):
            site = Site('attention', phase, 'context')
            times = 2 * 2 * int(layers * share)  # keys and values of both chunks
            yield Expected.over(config, site, PERMUTE, ends, times, ENDS)


def blocks_of_others(config: Config) -> Share:
    """Return the average number of a layer's blocks of keys that come from other shards.

    There is one block for each other shard or, with a window, one halo.
    """
    others, shares = config.mesh.context - 1, windows_within(config).items()
    if config.mesh.exchanges_heads:
        return 0
    return sum(share * (min(others, 1) if window else others) for window, share in shares)


def kept_of_halos(config: Config) -> Share:
    """Return the average number of other shards' tokens whose keys and values a layer saves."""
    if config.mesh.context == 1 or config.mesh.exchanges_heads:
        return 0
    shares = windows_within(config).items()
    return sum(2 * window * share for window, share in shares if window)


def _heads(
    config: Config, layers: int, *, sent_again: int = 0, source: str = ''
) -> Iterator[Expected]:
    """Yield the all-to-alls of queries and outputs, and of keys and values, of each pass.

    The backward pass sends their gradients, and the outputs `sent_again` times.
    """
    model, shards = config.model, config.mesh.model
    for phase in passes(config):
        site, again = Site('attention', phase, 'context'), sent_again * (phase == 'backward')
        of_queries, of_keys = (
            heads(config, x // shards) for x in (model.num_heads, model.num_kv_heads)
        )
        for array, times in ((of_queries, 2 + again), (of_keys, 2)):
            yield Expected.over(config, site, EXCHANGE, array, times * layers, source)


def _exchanges(
    config: Config, layers: int, exchange: str, *, dtype: str, hops: int, source: str
) -> Iterator[Expected]:
    """Yield the collectives of all passes, with sums of gradients in `dtype`.

    `hops` is how often a shard of a ring sends the sums to the next shard.
    """
    if not layers:
        return
    shards, is_ring = config.mesh.context, exchange == 'ring'
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
    """Return the keys [shard, B, S, K, H] of all context shards that a tensor-parallel rank reads.

    If several ranks share a head, each has a copy of it.
    """
    of_shard = heads(config, max(config.model.num_kv_heads // config.mesh.model, 1))
    return of_shard._replace(shape=(config.mesh.context, *of_shard.shape))
