"""The sums of norms of queries and keys over all heads, which `model` shards.

OLMo 2 norms all queries of a token together, and all its keys together. Megatron-Core norms each
head by itself, which needs no sum over devices. The closest code is Megatron's InternViT example,
which gathers the sums of the queries and the sums of the keys, in the forward pass only. In
megajax, a layer reduces two numbers per token in one all-reduce, and the backward pass reduces the
gradients of both in one. LayerNorm needs another one in each pass, for the means.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import REDUCE, Expected, Site, activation, passes
from megajax.xla.hlo.program import Array

SITE = 'qk_norm'
SOURCE = 'the least for OLMo 2 (2024): q and k in one sum; Megatron-Core norms each head'


def sums_over_heads(config: Config, layers: int) -> Iterator[Expected]:
    """Yield the all-reduces for `layers` runs of a layer; nothing if the model has no such norms.

    With 2-D tensor parallelism, the sequences are sharded over `row`.
    """
    if not config.model.norms_all_heads or config.mesh.model == 1:
        return
    rows, tokens, _ = activation(config).shape
    sums = 1 if config.model.norm == 'rmsnorm' else 2
    times = sums * layers
    for phase in passes(config):
        array = Array('f32', (rows // config.mesh.model_rows, tokens, 2))
        yield Expected.over(config, Site(SITE, phase, 'model'), REDUCE, array, times, SOURCE)
