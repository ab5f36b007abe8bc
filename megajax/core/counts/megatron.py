"""The collectives that Megatron-LM places manually, for the training step of a config.

They follow Megatron-Core's code, with megajax's padding of the vocabulary. This file has the
collectives of tensor parallelism, `data_parallel.py` of data parallelism, `stages.py` of pipeline
parallelism and `context.py` of context parallelism. 2-D tensor parallelism, which Megatron does not
have, follows a paper (`grid.py`).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts import current_scaling
from megajax.core.counts.collective import (
    GATHER,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    activation,
    axes_text,
    passes,
)
from megajax.core.counts.context import of_documents, over_context, own_over_context
from megajax.core.counts.cross_attention import cross_layers
from megajax.core.counts.data_parallel import SHARDS, over_data
from megajax.core.counts.experts import of_megatron, over_experts
from megajax.core.counts.grid import over_grid
from megajax.core.counts.layers import layer, num_in_stack, stacks
from megajax.core.counts.muon import exchanges, over_tensor_parallel
from megajax.core.counts.parameters import dim_sizes, elements, parameters
from megajax.core.counts.product import Phase
from megajax.core.counts.qk_norm import sums_over_heads
from megajax.core.counts.runs import Runs
from megajax.core.counts.stages import (
    EVERY_TICK,
    between_lockstep_stages,
    between_stages,
    gradients_of_lockstep_stages,
    gradients_of_stages,
    head_input,
)
from megajax.core.counts.vision import (
    encoder_in_parallel,
    images_over_devices,
    padding_at_rest,
    relevance_over_devices,
)
from megajax.xla.hlo.program import Array


def expected(config: Config) -> list[Expected]:
    """Return every collective of a step of `config`, except collectives of scalars.

    For 2-D tensor parallelism, which Megatron does not have, they follow Pope et al. (`grid.py`).
    With pipeline parallelism, each site has the collectives of the rank that sends most at that
    site.
    """
    mesh, runs = config.mesh, Runs.of_megatron(config)
    maxima = *over_products(config), *current_scaling.of_transformer_engine(config)
    if mesh.is_grid:
        return [*over_grid(config), *over_data(config), *maxima]
    return [
        *over_model(config, runs),
        *maxima,
        *(over_context(config, runs.layers) if mesh.context > 1 else ()),
        *(between_stages(config) if mesh.stages > 1 else ()),
        *(gradients_of_stages(config) if mesh.stages > 1 else over_data(config)),
        *over_tensor_parallel(config),
        *of_megatron(config, runs.layers),
    ]


def stated(config: Config) -> list[Expected]:
    """Return the collectives that a step sends at most, for the sites where Megatron's differ.

    The differences are the price of one program for all stages (`stages.py`), of sums in fp32 and
    document ids (`context.py`), of buffers with static sizes (`experts.py`), of shards that are not
    whole matrices (`muon.py`), and of one FP8 scale for all shards of a tensor
    (`current_scaling.py`). A vision encoder has entirely different collectives (`vision.py`).
    """
    of_scales = current_scaling.of_step(config)
    return [*_stated_in_passes(config), *of_documents(config), *exchanges(config), *of_scales]


def _stated_in_passes(config: Config) -> list[Expected]:
    mesh, runs = config.mesh, Runs.of_stages(config)
    routed = [x for x in over_experts(config, runs.layers) if x.site.phase != 'step']
    if config.vision is not None:
        padding = padding_at_rest(config)
        beside = [x for x in over_data(config) if padding and x.site == padding.site]
        return [
            *([padding, *beside] if padding else ()),
            *images_over_devices(config),
            *relevance_over_devices(config),
            *_vectors(config, Runs.of_megatron(config)),
            *over_products(config),
            *routed,
        ]
    context = own_over_context(config, runs.layers) if mesh.context > 1 else ()
    if mesh.stages == 1:
        return [*context, *routed]
    repeated = (*over_model(config, runs), *context, *routed)
    return [
        *(dataclasses.replace(x, source=EVERY_TICK) for x in repeated),
        *between_lockstep_stages(config),
        *gradients_of_lockstep_stages(config),
    ]


def over_model(config: Config, runs: Runs) -> list[Expected]:
    """Return the collectives of a tensor-parallel group; `runs` is how often it runs its parts."""
    if config.mesh.model == 1:
        return []
    of_images = encoder_in_parallel, cross_layers
    sites = _embedding, _layers, few_kv_heads, _head, _loss, _vectors, *of_images
    return [
        *(collective for site in sites for collective in site(config, runs)),
        *sums_over_heads(config, runs.layers),
    ]


# Files and functions of Megatron-Core, below megatron/core.
_LINEAR = 'tensor_parallel/layers.py LinearWithGradAccumulationAndAsyncCommunication'
SOURCES = {
    'embedding': 'tensor_parallel/layers.py VocabParallelEmbedding.forward',
    'attention': f'{_LINEAR}, RowParallelLinear.forward',
    'mlp': f'{_LINEAR}, RowParallelLinear.forward',
    'experts': f'transformer/moe/experts.py, {_LINEAR}',
    'head': _LINEAR,
    'loss': 'tensor_parallel/cross_entropy.py _VocabParallelCrossEntropy.forward',
    'fp8': 'transformer_engine/pytorch FP8GlobalStateManager.reduce_and_update_fp8_tensors',
    'gradients': 'distributed/finalize_model_grads.py _allreduce_non_tensor_model_parallel_grads',
}


def _over_model(
    config: Config, name: str, phase: Phase, kinds: tuple[str, ...], array: Array, times: int
) -> Iterator[Expected]:
    for kind in kinds:
        site = Site(name, phase, 'model')
        yield Expected.over(config, site, kind, array, times, SOURCES[name])


def _embedding(config: Config, runs: Runs) -> Iterator[Expected]:
    stream, times = activation(config), runs.embedding
    if config.mesh.sequence_parallel:
        yield from _over_model(config, 'embedding', 'forward', (SCATTER,), stream, times)
        if not config.model.is_decoder_frozen:
            yield from _over_model(config, 'embedding', 'backward', (GATHER,), stream, times)
    else:
        yield from _over_model(config, 'embedding', 'forward', (REDUCE,), stream, times)


def _layers(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield the collectives of the layers.

    With fp8, a matmul's operands are gathered in FP8, and its result is reduced in 16 bits.
    """
    stream, is_scattered = activation(config), config.mesh.sequence_parallel
    learns = config.lora is not None or not config.model.is_decoder_frozen
    model = config.model
    for sublayer, dim in stacks(model):
        name, times = sublayer.name, num_in_stack(model, dim, runs.layers)
        of_x = _operand(config, sublayer.first.name, 'f8e4m3fn')
        of_dy = _operand(config, sublayer.second.name, 'f8e5m2')
        for phase in passes(config):
            is_backward = phase == 'backward'
            gathered = (of_dy if is_backward else of_x, (GATHER,)), (stream, (SCATTER,))
            again = ((of_x, _again(learns)),) if is_backward else ()
            sent = (*gathered, *again) if is_scattered else ((stream, (REDUCE,)),)
            for array, kinds in sent:
                yield from _over_model(config, name, phase, kinds, array, times)


def _operand(config: Config, linear: str, dtype: str) -> Array:
    """Return an operand of a linear layer in the dtype in which it is gathered: `dtype` with fp8.

    With an adapter, it is gathered in 16 bits, as in Transformer Engine with
    `return_layernorm_output_gathered`.
    """
    stream, lora = activation(config), config.lora
    is_narrow = config.train.dtype == 'fp8' and not (lora and linear in lora.targets)
    return stream._replace(dtype=dtype) if is_narrow else stream


def over_products(config: Config) -> Iterator[Expected]:
    """Yield the max-reductions of fp8 matmuls' operands over all devices, for delayed scaling.

    Without ZeRO, the maxima of the weights are the same on all data shards; with it, each data
    shard has its own. A pipeline stage only has the maxima of its own layers.
    """
    if not config.train.has_delayed_scales:
        return
    mesh, every = config.mesh, parameters(config.model)
    layers = dim_sizes(config.model)['L'] // mesh.stages
    products = sum(layers for _, x in every if x.dims[0] == 'L' and x.is_matrix)
    same = [axis for axis in mesh.sizes if axis != 'stage']
    at_rest = () if config.optim.shard == 'none' else SHARDS
    for axes, count in ((same, 3 * products), ((*at_rest, 'row', 'model'), products)):
        if axis := axes_text(config, *axes):
            site, array = Site('gradients', 'step', axis), Array('f32', (count,))
            yield Expected.over(config, site, REDUCE, array, 1, SOURCES['fp8'])


def _again(learns: bool) -> tuple[str, ...]:
    """Return the gather of a matmul's input for the gradient of a weight that `learns`.

    With sequence parallelism, Megatron saves the sharded input, and gathers it again.
    """
    return (GATHER,) if learns else ()


def few_kv_heads(config: Config, runs: Runs | None = None) -> Iterator[Expected]:
    """Yield the gathers of each layer's full QKV, for fewer key/value heads than devices."""
    model, runs = config.model, runs or Runs.of_megatron(config)
    if model.num_kv_heads >= config.mesh.model:
        return
    stream, outputs = activation(config), layer(model)[0].first.outputs
    qkv = stream._replace(shape=(*stream.shape[:2], elements(outputs, dim_sizes(model))))
    for phase in passes(config):
        kind = SCATTER if phase == 'backward' else GATHER
        yield from _over_model(config, 'attention', phase, (kind,), qkv, runs.layers)


def _head(config: Config, runs: Runs) -> Iterator[Expected]:
    stream, times = head_input(config, runs.head_parts), runs.head
    if not config.mesh.sequence_parallel:
        yield from _over_model(config, 'head', 'backward', (REDUCE,), stream, times)
        return
    gathered = [stream, *([activation(config)] if config.model.is_bert else [])]
    # the gather of the pooler's first token is one of these
    for array, count in Counter(gathered).items():
        yield from _over_model(config, 'head', 'forward', (GATHER,), array, count * times)
    backward = (SCATTER, *_again(not config.model.is_decoder_frozen))
    yield from _over_model(config, 'head', 'backward', backward, stream, times)


def _loss(config: Config, runs: Runs) -> Iterator[Expected]:
    # The maximum, the denominator and the label's logit. Megatron's label smoothing is wrong on
    # more than one device; the sum of the mean logit corrects it.
    count = 4 if config.loss.label_smoothing else 3
    tokens = Array('f32', head_input(config, runs.head_parts).shape[:2])
    yield from _over_model(config, 'loss', 'forward', (REDUCE,) * count, tokens, runs.head)


def _vectors(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield the reduction of partial gradients of replicated vectors.

    Each device applies a vector to its part of the sequence or of the heads. Gradients of the
    replicated half of an adapter are partial, too, because each device has a part of the weight.
    """
    learned = [x for _, x in parameters(config.model) if not x.is_frozen]
    heads = [x for x in learned if x.summed and x.summed in 'NFA']
    tokens = [x for x in learned if x.summed == 'T']
    partial = heads + (tokens if config.mesh.sequence_parallel else [])
    if partial:
        sizes = dim_sizes(config.model)
        stages = dict.fromkeys('LΔΛ', config.mesh.stages)
        shards = {**stages, 'X': config.mesh.experts}
        array = Array('f32', (sum(elements(x.dims, sizes, shards) for x in partial),))
        site = Site('gradients', 'step', 'model')
        yield Expected.over(config, site, REDUCE, array, 1, SOURCES['gradients'])
