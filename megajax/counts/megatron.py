"""The collectives that Megatron-LM places manually, for the training step of a config.

They follow Megatron-Core's code, with megajax's padding of the vocabulary. Those of tensor
parallelism are here, those of data parallelism in `data_parallel.py`. A grid has those of another
paper (`grid.py`).
"""

from collections.abc import Iterator

from megajax.config import Config
from megajax.counts.collective import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    activation,
    passes,
)
from megajax.counts.data_parallel import over_data
from megajax.counts.grid import over_grid
from megajax.counts.parameters import dim_sizes, num_elements, parameters
from megajax.counts.products import Phase
from megajax.hlo.program import Array

__all__ = [
    'GATHER',
    'HLO_DTYPES',
    'REDUCE',
    'SCATTER',
    'Expected',
    'Site',
    'expected',
    'few_kv_heads',
    'over_data',
    'passes',
]


def expected(config: Config) -> list[Expected]:
    """Return every collective of a step of `config`, except those of scalars.

    Where tensor parallelism is 2-D, which Megatron does not have, they are those of Pope et al.
    (`grid.py`).
    """
    if config.mesh.is_grid:
        return [*over_grid(config), *over_data(config)]
    sites = _embedding, _layers, few_kv_heads, _head, _loss, _vectors
    over_model = (collective for site in sites for collective in site(config))
    return [*(over_model if config.mesh.model > 1 else ()), *over_data(config)]


# Files and functions of Megatron-Core, below megatron/core.
_LINEAR = 'tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication'
SOURCES = {
    'embedding': 'tensor_parallel/layers.py VocabParallelEmbedding.forward',
    'attention': f'{_LINEAR}, RowParallelLinear.forward',
    'mlp': f'{_LINEAR}, RowParallelLinear.forward',
    'head': _LINEAR,
    'loss': 'tensor_parallel/cross_entropy.py _VocabParallelCrossEntropy.forward',
    'gradients': 'distributed/finalize_model_grads.py _allreduce_non_tensor_model_parallel_grads',
}


def _over_model(
    config: Config, name: str, phase: Phase, kinds: tuple[str, ...], array: Array, times: int = 1
) -> Iterator[Expected]:
    for kind in kinds:
        yield Expected(
            site=Site(name, phase, 'model'),
            kind=kind,
            array=array,
            times=times * config.train.microbatches,
            size=config.mesh.model,
            source=SOURCES[name],
        )


def _embedding(config: Config) -> Iterator[Expected]:
    if config.mesh.sequence_parallel:
        yield from _over_model(config, 'embedding', 'forward', (SCATTER,), activation(config))
        yield from _over_model(config, 'embedding', 'backward', (GATHER,), activation(config))
    else:
        yield from _over_model(config, 'embedding', 'forward', (REDUCE,), activation(config))


def _layers(config: Config) -> Iterator[Expected]:
    sequence_parallel, layers = config.mesh.sequence_parallel, config.model.num_layers
    forward = (GATHER, SCATTER) if sequence_parallel else (REDUCE,)
    # With sequence parallelism Megatron keeps a layer's input sharded and gathers it again for the
    # weight gradient.
    backward = (GATHER, SCATTER, GATHER) if sequence_parallel else (REDUCE,)
    for name in ('attention', 'mlp'):
        for phase in passes(config):
            yield from _over_model(
                config,
                name,
                phase,
                backward if phase == 'backward' else forward,
                activation(config),
                layers,
            )


def few_kv_heads(config: Config) -> Iterator[Expected]:
    """Yield the gathers of each layer's full QKV, with fewer key/value heads than devices."""
    model = config.model
    if model.num_kv_heads >= config.mesh.model:
        return
    columns = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    qkv = Array(
        HLO_DTYPES[config.train.dtype], (config.microbatch_rows, config.train.seq_len, columns)
    )
    for phase in passes(config):
        kind = SCATTER if phase == 'backward' else GATHER
        yield from _over_model(config, 'attention', phase, (kind,), qkv, model.num_layers)


def _head(config: Config) -> Iterator[Expected]:
    if config.mesh.sequence_parallel:
        pooler = 1 if config.model.is_bert else 0  # gathers all tokens, for the first one
        yield from _over_model(config, 'head', 'forward', (GATHER,), activation(config), 1 + pooler)
        yield from _over_model(config, 'head', 'backward', (SCATTER, GATHER), activation(config))
    else:
        yield from _over_model(config, 'head', 'backward', (REDUCE,), activation(config))


def _loss(config: Config) -> Iterator[Expected]:
    # Maximum, denominator, the label's logit. Megatron's label smoothing is wrong on more than one
    # device; the mean logit corrects it.
    count = 4 if config.loss.label_smoothing else 3
    yield from _over_model(
        config, 'loss', 'forward', (REDUCE,) * count, Array('f32', activation(config).shape[:2])
    )


def _vectors(config: Config) -> Iterator[Expected]:
    """Yield the reduction of partial gradients of replicated vectors.

    Each device sees a part of the sequence, or of the heads, that the vector is applied along.
    """
    heads = [x for _, x in parameters(config.model) if x.partial == 'N']
    tokens = [x for _, x in parameters(config.model) if x.partial == 'T']
    partial = heads + (tokens if config.mesh.sequence_parallel else [])
    if partial:
        sizes = dim_sizes(config.model)
        array = Array('f32', (sum(num_elements(x, sizes) for x in partial),))
        yield Expected(
            site=Site('gradients', 'step', 'model'),
            kind=REDUCE,
            array=array,
            times=1,
            size=config.mesh.model,
            source=SOURCES['gradients'],
        )
