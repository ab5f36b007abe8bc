"""The collectives that Megatron-LM places manually, for the training step of a config.

They follow megatron-core's code (layers.py, mappings.py, cross_entropy.py,
finalize_model_grads.py, distrib_optimizer.py), with megajax's padding of the vocabulary.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from megajax.config import Config
from megajax.counts.parameters import Counts, dim_sizes, megatron_counts, num_elements, parameters
from megajax.counts.products import Phase
from megajax.hlo.program import Array
from megajax.hlo.transfers import ring_bytes

HLO_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16'}


class Site(NamedTuple):
    """The place of a collective: a part of the step, its phase, and the mesh axis."""

    name: str
    phase: Phase
    axis: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """A collective of a step.

    `array` is the full array that is gathered, reduced or scattered over a group of `size` devices.
    """

    site: Site
    kind: str
    array: Array
    times: int
    size: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in one execution."""
        return ring_bytes(self.kind, self.array, self.size)


def expected(config: Config) -> list[Expected]:
    """Return every collective of a step of `config`, except those of scalars."""
    sites = _embedding, _layers, few_kv_heads, _head, _loss, _vectors
    over_model = (collective for site in sites for collective in site(config))
    return [*(over_model if config.mesh.model > 1 else ()), *over_data(config)]


def _activation(config: Config) -> Array:
    return Array(
        HLO_DTYPES[config.train.dtype],
        (config.microbatch_rows, config.train.seq_len, config.model.hidden_size),
    )


def _over_model(
    config: Config, name: str, phase: Phase, kinds: tuple[str, ...], array: Array, times: int = 1
) -> Iterator[Expected]:
    site, times = Site(name, phase, 'model'), times * config.train.microbatches
    for kind in kinds:
        yield Expected(site=site, kind=kind, array=array, times=times, size=config.mesh.model)


GATHER, REDUCE, SCATTER = 'all-gather', 'all-reduce', 'reduce-scatter'


def _embedding(config: Config) -> Iterator[Expected]:
    if config.mesh.sequence_parallel:
        yield from _over_model(config, 'embedding', 'forward', (SCATTER,), _activation(config))
        yield from _over_model(config, 'embedding', 'backward', (GATHER,), _activation(config))
    else:
        yield from _over_model(config, 'embedding', 'forward', (REDUCE,), _activation(config))


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
                _activation(config),
                layers,
            )


def passes(config: Config) -> tuple[Phase, ...]:
    """Return the phases of a layer in a step."""
    return (
        ('forward', 'backward', 'recompute')
        if config.train.recompute == 'full'
        else ('forward', 'backward')
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
        yield from _over_model(
            config, 'head', 'forward', (GATHER,), _activation(config), 1 + pooler
        )
        yield from _over_model(config, 'head', 'backward', (SCATTER, GATHER), _activation(config))
    else:
        yield from _over_model(config, 'head', 'backward', (REDUCE,), _activation(config))


def _loss(config: Config) -> Iterator[Expected]:
    # Maximum, denominator, the label's logit. Megatron's label smoothing is wrong on more than one
    # device; the mean logit corrects it.
    count = 4 if config.loss.label_smoothing else 3
    yield from _over_model(
        config, 'loss', 'forward', (REDUCE,) * count, Array('f32', _activation(config).shape[:2])
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
        )


def over_data(config: Config, counts: Counts | None = None) -> Iterator[Expected]:
    """Yield the collectives over `data`, which run once a step.

    With ZeRO-1, gradients of matrices are reduce-scattered, and the matrices are gathered for the
    next step. `counts` are the parameters of a device, by default as Megatron shards them.
    """
    if config.mesh.data == 1:
        return
    matrices, total = counts or megatron_counts(config.model, config.mesh.model)

    def send(name: str, kind: str, dtype: str, count: int) -> Expected:
        return Expected(
            site=Site(name, 'step', 'data'),
            kind=kind,
            array=Array(dtype, (count,)),
            times=1,
            size=config.mesh.data,
        )

    if config.optim.shard:
        yield send('parameters', GATHER, HLO_DTYPES[config.train.dtype], matrices)
        yield send('gradients', SCATTER, 'f32', matrices)
        yield send('gradients', REDUCE, 'f32', total - matrices)
    else:
        yield send('gradients', REDUCE, 'f32', total)
