"""The parameters that process images: the vision encoder, the scorers and relevance's networks.

Letters here are the encoder's own dims. In the whole model, these letters are circled.
"""

import dataclasses
import functools
from collections.abc import Mapping

from megajax.core.config.model import ModelConfig, encoder_layers
from megajax.core.config.vision import TEXTURE_CHANNELS, Part, RelevanceConfig, VisionConfig
from megajax.core.counts import layers
from megajax.core.counts.declaration import (
    IMAGES,
    Declared,
    Parameter,
    Role,
    base_sizes,
    frozen,
    linear,
    norm,
    prefixed,
)

MERGERS = 'merger', 'deep_mergers'  # the part `merger` of `vision.freeze`
SCORERS = 3
# The features of a region: its texture, its difference from the image's mean, and its first scores.
SCORER_FEATURES = 2 * TEXTURE_CHANNELS + SCORERS
SUMMARIES = 3 * SCORERS  # the mean, the maximum and the standard deviation of each score
# as large as the patch embedding; otherwise positions look alike for a long part of training
POSITION_STD = 0.5
RELEVANCE_HIDDEN = 64  # hidden units of relevance's two networks other than the scorers


@functools.cache
def declare_vision(vision: VisionConfig, freeze: tuple[Part, ...]) -> Declared:
    """Declare the parameters of the vision encoder, with letters of its own dims.

    The parts in `freeze` are frozen.
    """
    blocks = encoder_layers(vision)
    # Outputs are as large as the inputs, so that images are neither louder nor fainter than text.
    patch_std = (vision.frames * vision.num_channels * vision.patch_size**2) ** -0.5
    merger_std = vision.merged_size**-0.5

    def merger(normed: str) -> Declared:
        return {
            'norm': norm(blocks, normed, summed=''),
            'up': {**linear('W', 'w', merger_std), 'bias': Parameter('W', Role.VECTOR)},
            'down': linear('W', 'E', merger_std, bias=True),
        }

    declared: dict[str, Parameter | Declared] = {
        'patch': linear('YQX', 'D', patch_std, bias=True),
        'position': {'table': Parameter('SD', Role.TABLE, POSITION_STD)},
        'layers': prefixed(layers.declared(blocks, layers.layer(blocks)), 'L'),
        'merger': merger('D'),
    }
    if vision.deepstack:
        declared['deep_mergers'] = prefixed(merger('W'), 'A')
    parts = {name: 'merger' if name in MERGERS else 'encoder' for name in declared}
    kept = {name: declared[name] for name, part in parts.items() if part in freeze}
    return declared | dict(frozen(kept))


@functools.cache
def declare_scorers(model: ModelConfig, relevance: RelevanceConfig) -> Declared:
    """Declare the scorers of regions, in slots, with dims named by the vision encoder's letters.

    Like the encoder's parameters, they are stored in shards, and copied to every device for a step.
    A device uses only its own slots of the copy.
    """
    hidden = relevance.scorer_size // relevance.scorer_shards
    return {
        'features': Parameter('PZR', Role.MATRIX, SCORER_FEATURES**-0.5),
        'query': Parameter('PER', Role.MATRIX, model.hidden_size**-0.5),
        'bias': Parameter('PR', Role.VECTOR),
        'out': Parameter('PR', Role.MATRIX, 0.1 * hidden**-0.5),
    }


def declare_relevance(model: ModelConfig, relevance: RelevanceConfig) -> Declared:
    """Declare the networks of relevance; those other than the scorers are small and unsharded."""
    hidden, size = RELEVANCE_HIDDEN**-0.5, model.hidden_size**-0.5

    def table(dims: str, std: float) -> Parameter:
        return Parameter(circled(dims), Role.TABLE, std)

    return {
        'coupling': {'texture': table('TB', TEXTURE_CHANNELS**-0.5), 'out': table('BE', hidden)},
        'scorers': of_encoder(declare_scorers(model, relevance)),
        'balance': {
            'summary': table('MB', SUMMARIES**-0.5),
            'query': table('EB', size),
            'out': table('BG', hidden),
        },
    }


def of_encoder(declared: Declared) -> Declared:
    """Return the encoder's parameters as a part of the whole model, with circled letters.

    Images are sharded, so every shard computes a partial gradient of each parameter.
    """
    return {
        name: in_model(x) if isinstance(x, Parameter) else of_encoder(x)
        for name, x in declared.items()
    }


def in_model(parameter: Parameter) -> Parameter:
    """Return the declaration of the encoder's parameter as one of the whole model."""
    dims, inputs = circled(parameter.dims), circled(parameter.inputs)
    return dataclasses.replace(parameter, dims=dims, inputs=inputs, summed=IMAGES, owner='encoder')


def circled(dims: str) -> str:
    """Return the letters of the vision encoder's dims: `Ⓓ` is its D."""
    return ''.join(
        chr(ord(letter) + (ord('Ⓐ') - ord('A') if letter.isupper() else ord('ⓐ') - ord('a')))
        for letter in dims
    )


def vision_sizes(model: ModelConfig) -> Mapping[str, int]:
    """Return the size of each letter of the vision encoder's dims."""
    vision = model.vision
    assert vision is not None
    return {
        **base_sizes(encoder_layers(vision)),
        'A': len(vision.deepstack),
        'E': model.hidden_size,
        'Q': vision.frames,
        'S': vision.positions**2,
        'W': vision.merged_size,
        'X': vision.patch_size**2,
        'Y': vision.num_channels,
        **({} if vision.relevance is None else _relevance_sizes(vision.relevance)),
    }


def _relevance_sizes(relevance: RelevanceConfig) -> Mapping[str, int]:
    return {
        'B': RELEVANCE_HIDDEN,
        'G': SCORERS,
        'P': SCORERS * relevance.scorer_shards,
        'M': SUMMARIES,
        'R': relevance.scorer_size // relevance.scorer_shards,
        'T': TEXTURE_CHANNELS,
        'Z': SCORER_FEATURES,
    }
