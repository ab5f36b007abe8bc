"""The collectives of a vision encoder: Megatron's, and megajax's replacements.

Megatron divides each layer of the encoder over the ranks of the decoder (`LLaVAModel`), and every
rank encodes all images of its data shard: this takes two all-reduces per layer and pass, and two
for the layers of the projection. In megajax, a device has whole weights and some of the images, so
one all-gather of the image vectors replaces all of these all-reduces. The weights are gathered once
per step, and their gradients scattered; between steps they are sharded over `model`.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from math import prod

from megajax.core.config import Config
from megajax.core.config.vision import TEXTURE_CHANNELS
from megajax.core.counts.collective import (
    GATHER,
    HLO_DTYPES,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    axes_text,
    passes,
)
from megajax.core.counts.data_parallel import SHARDS
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import (
    Counts,
    dim_sizes,
    elements,
    own_counts,
    parameters,
    shape_of,
)
from megajax.core.counts.product import Phase
from megajax.core.counts.relevance import num_slots
from megajax.core.counts.runs import Runs
from megajax.core.parallel.layout import BATCH_AXES, Layout
from megajax.xla.hlo.program import Array

# Files and functions of Megatron-Core, below megatron/core.
SOURCES = {
    'layers': 'models/vision/clip_vit_model.py CLIPViTModel.forward',
    'projection': 'models/vision/multimodal_projector.py MultimodalProjector.forward',
}
WHOLE = 'whole weights and some of the images on each device'


def images_of_microbatch(config: Config) -> int:
    """Return the number of image slots of a data shard in a microbatch."""
    vision = config.vision
    assert vision is not None
    return config.microbatch_rows * vision.images


def images_of_device(config: Config) -> int:
    """Return the number of images that a device encodes in a microbatch, with empty slots."""
    return -(-images_of_microbatch(config) // config.mesh.model)


def vectors(config: Config) -> Array:
    """Return the vectors [N, 1 + taps, D] of the images of a microbatch, on a data shard."""
    vision = config.vision
    assert vision is not None
    count = images_of_device(config) * config.mesh.model * vision.vectors
    shape = count, 1 + len(vision.deepstack), config.model.hidden_size
    return Array(HLO_DTYPES[config.train.dtype], shape)


def encoder_in_parallel(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield Megatron's collectives for an encoder whose layers are divided over its ranks."""
    vision = config.vision
    if vision is None:
        return
    dtype, images = HLO_DTYPES[config.train.dtype], images_of_microbatch(config)
    stream = Array(dtype, (images, vision.read_patches, vision.hidden_size))
    merged, times = images * vision.vectors, runs.embedding
    mergers = times * (1 + len(vision.deepstack))
    for phase in passes(config):
        arrays = [('layers', stream, 2 * runs.encoder)]
        if phase != 'recompute':
            width = config.model.hidden_size if phase == 'forward' else vision.merged_size
            arrays.append(('projection', Array(dtype, (merged, width)), mergers))
        for name, array, count in arrays:
            site = Site('vision', phase, 'model')
            yield Expected.over(config, site, REDUCE, array, count, SOURCES[name])


def is_learned(config: Config) -> bool:
    """Whether any part of the encoder, or anything that its input depends on, has gradients."""
    return bool(config.relevance) or not {'encoder', 'merger'} <= set(
        config.model.frozen_image_parts
    )


def runs_backward(config: Config) -> bool:
    """Whether a step has a backward pass of the encoder's layers.

    Relevance multiplies the patches by gates, whose gradient passes through a frozen encoder too.
    """
    return bool(config.relevance) or 'encoder' not in config.model.frozen_image_parts


def images_over_devices(config: Config) -> Iterator[Expected]:
    """Yield the collectives of `core/model/images.py` and `core/train/zero.py`."""
    mesh, runs = config.mesh, config.train.microbatches
    assert config.vision is not None

    def sent(site: Site, kind: str, array: Array, times: int = 1) -> Expected:
        return Expected.over(config, site, kind, array, times, WHOLE)

    if mesh.model > 1:
        yield sent(Site('vision', 'forward', 'model'), GATHER, vectors(config), runs)
        if is_learned(config) and (mesh.sequence_parallel or config.model.num_cross_layers):
            yield sent(Site('vision', 'backward', 'model'), SCATTER, vectors(config), runs)
    own = [x for _, x in parameters(config.model) if x.owner == 'encoder']
    matrices = _padded(config, [x for x in own if x.is_matrix])
    to_learn = [x for x in own if x.is_matrix and not x.is_frozen]
    learned = _padded(config, to_learn)
    others = _count(config, [x for x in own if not x.is_matrix and not x.is_frozen])
    every = axes_text(config, *BATCH_AXES, 'model')
    if mesh.model > 1:
        weights = Array(HLO_DTYPES[config.train.dtype], (matrices,))
        is_over_data = config.optim.shard != 'none' and mesh.data_shards > 1
        axis = axes_text(config, *SHARDS, 'model') if is_over_data else 'model'
        yield sent(Site('parameters', 'step', axis), GATHER, weights)
        if not is_learned(config):
            return
        gradients = Array(HLO_DTYPES[config.optim.reduce_dtype], (learned,))
        yield sent(Site('gradients', 'step', 'model'), SCATTER, gradients)
        yield sent(Site('gradients', 'step', every), REDUCE, Array('f32', (others,)))


def padding_at_rest(config: Config) -> Expected | None:
    """Return the padding that uneven dims add to the encoder's gradients over `data`, if any.

    Megatron pads buckets of all parameters instead, by fewer elements.
    """
    chosen = [
        x
        for _, x in parameters(config.model)
        if x.owner == 'encoder' and x.is_matrix and not x.is_frozen
    ]
    added = _padded(config, chosen) - _count(config, chosen)
    mesh, optim = config.mesh, config.optim
    if not added or optim.shard == 'none' or mesh.data_shards == 1:
        return None
    phase: Phase = 'step' if optim.shard == 'optimizer' else 'backward'
    site = Site('gradients', phase, axes_text(config, *SHARDS))
    array = Array(HLO_DTYPES[optim.reduce_dtype], (added // mesh.model,))
    return Expected.over(config, site, SCATTER, array, 1, WHOLE)


def counts_over_data(config: Config, of_experts: bool | None = None) -> tuple[Counts, Counts]:
    """Count a device's parameters that are gathered over `data`, and those with summed gradients.

    `of_experts` is as in `count`. An encoder's matrices are gathered over `model` too, and are not
    counted. The gradients of its matrices are sharded over `model`, and the gradients of its
    vectors are summed over all axes.
    """
    every, learned = (
        own_counts(config, learned=only, of_experts=of_experts) for only in (False, True)
    )
    if config.vision is None or config.mesh.model == 1 or of_experts:
        return every, learned
    own = [x for _, x in parameters(config.model) if x.owner == 'encoder']
    to_learn = [x for x in own if not x.is_frozen]
    every = every._replace(matrices=every.matrices - _count(config, _matrices(own)))
    others = learned.all - learned.matrices - _count(config, to_learn)
    others += _count(config, _matrices(to_learn))
    matrices = learned.matrices - _count(config, _matrices(to_learn))
    matrices += _padded(config, _matrices(to_learn)) // config.mesh.model
    return every, learned._replace(matrices=matrices, all=matrices + others)


def _matrices(chosen: list[Parameter]) -> list[Parameter]:
    return [x for x in chosen if x.is_matrix]


def relevance_over_devices(config: Config) -> Iterator[Expected]:
    """Yield the collectives of `core/model/arr_coc`; Megatron has nothing like it."""
    if config.relevance is None or config.mesh.model == 1:
        return
    arrays = relevance_arrays(config)
    sent: list[tuple[Phase, str, Array]] = [
        ('forward', GATHER, arrays['texture']),
        ('forward', GATHER, arrays['scores']),
        ('backward', GATHER, arrays['gate']),
    ]
    if config.mesh.sequence_parallel:
        sent.append(('forward', REDUCE, arrays['query']))
    source = 'one scorer, or a part of one, on each device'
    for phase, kind, array in sent:
        site = Site('relevance', phase, 'model')
        yield Expected.over(config, site, kind, array, config.train.microbatches, source)


def relevance_arrays(config: Config) -> dict[str, Array]:
    """Return the arrays that relevance sends over `model` in a microbatch."""
    relevance, rows, shards = config.relevance, images_of_microbatch(config), config.mesh.model
    assert relevance is not None
    images, regions = images_of_device(config) * shards, relevance.num_regions
    return {
        'texture': Array('f32', (images, regions, TEXTURE_CHANNELS)),
        'scores': Array('f32', (num_slots(config, shards), rows, regions)),
        'gate': Array('f32', (shards, images // shards, regions)),
        'query': Array('f32', (config.microbatch_rows, config.model.hidden_size)),
    }


@functools.cache
def shapes(config: Config) -> Counter[tuple[int, ...]]:
    """Count the encoder's parameters by their dims above 1, without and with storage padding.

    The dims are sorted, because XLA for GPUs transposes a weight before gathering it.
    """
    layout, sizes = Layout.of(config), dim_sizes(config.model)
    found = Counter[tuple[int, ...]]()
    for _, x in parameters(config.model):
        if x.owner == 'encoder':
            shape = shape_of(x.dims, sizes)
            padded = tuple(map(sum, zip(shape, layout.padding(x.dims), strict=True)))
            found.update({tuple(sorted(n for n in one if n > 1)) for one in (shape, padded)})
    return found


def _padded(config: Config, chosen: list[Parameter]) -> int:
    """Count the stored elements; a dim is padded if its shards do not divide it."""
    layout, sizes = Layout.of(config), dim_sizes(config.model)
    return sum(
        prod(map(sum, zip(shape_of(x.dims, sizes), layout.padding(x.dims), strict=True)))
        for x in chosen
    )


def _count(config: Config, chosen: list[Parameter]) -> int:
    sizes = dim_sizes(config.model)
    return sum(elements(x.dims, sizes) for x in chosen)
