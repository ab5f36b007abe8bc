"""The collectives of gated cross-attention to images: Megatron's, and megajax's replacements.

Each cross-attention layer of Megatron (`CrossAttention`) computes its own keys and values, so every
layer reduces the gradient of the image vectors and, with sequence parallelism, gathers the vectors.
In megajax, one matmul computes the keys and values of all layers from vectors that were gathered
once (`vision.py`), so their gradient is also reduced once. Otherwise, a layer has the collectives
of a self-attention layer.
"""

from collections.abc import Iterator

from megajax.core.config import Config
from megajax.core.counts.collective import (
    GATHER,
    REDUCE,
    SCATTER,
    Expected,
    Site,
    activation,
    passes,
)
from megajax.core.counts.parameters import dim_sizes, elements
from megajax.core.counts.product import Phase
from megajax.core.counts.runs import Runs
from megajax.core.counts.vision import vectors
from megajax.xla.hlo.program import Array

SITE = 'cross_attention'
LAYER = 'transformer/transformer_layer.py TransformerLayer._forward_attention'
KEYS_VALUES = 'transformer/attention.py CrossAttention.get_query_key_value_tensors'


def cross_layers(config: Config, runs: Runs) -> Iterator[Expected]:
    """Yield Megatron's collectives for cross-attention layers, and for their MLPs."""
    if not runs.cross:
        return

    def sent(name: str, phase: Phase, kind: str, array: Array, source: str) -> Expected:
        return Expected.over(config, Site(name, phase, 'model'), kind, array, runs.cross, source)

    is_scattered = config.mesh.sequence_parallel
    kinds: dict[Phase, tuple[str, ...]] = {
        'forward': (GATHER, SCATTER) if is_scattered else (REDUCE,),
        'recompute': (GATHER, SCATTER) if is_scattered else (REDUCE,),
        'backward': (GATHER, SCATTER, GATHER) if is_scattered else (REDUCE,),
    }
    of_vectors: dict[Phase, tuple[str, ...]] = {
        'forward': (GATHER,) if is_scattered else (),
        'recompute': (GATHER,) if is_scattered else (),
        'backward': (SCATTER, GATHER) if is_scattered else (REDUCE,),
    }
    for phase in passes(config):
        for kind in kinds[phase]:
            for name in (SITE, 'mlp'):
                yield sent(name, phase, kind, activation(config), LAYER)
        for kind in of_vectors[phase]:
            yield sent(SITE, phase, kind, vectors(config), KEYS_VALUES)
        if config.model.num_kv_heads < config.mesh.model:
            kind = SCATTER if phase == 'backward' else GATHER
            yield sent(SITE, phase, kind, _keys_values(config), KEYS_VALUES)


def is_left_out(sent: Expected, config: Config) -> bool:
    """Whether computing keys and values once, for all layers, makes this collective unnecessary."""
    is_of_vectors = sent.array == vectors(config) or sent.site.phase == 'recompute'
    return sent.source == KEYS_VALUES and is_of_vectors


def _keys_values(config: Config) -> Array:
    """Return the keys and values of a layer, all of which Megatron gathers, as it does with QKV."""
    of_images, columns = vectors(config), elements('UKH', dim_sizes(config.model))
    return of_images._replace(shape=(of_images.shape[0], columns))
