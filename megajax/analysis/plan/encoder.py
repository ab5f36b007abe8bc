"""Count the memory of a vision encoder and of the layers that attend to images, per GPU.

The encoder is replicated, and each GPU encodes some of the images.
"""

import dataclasses
from typing import NamedTuple

from megajax.analysis.plan.layer_memory import up_and_hidden
from megajax.analysis.plan.live_memory import Held
from megajax.analysis.plan.sizes import FLOAT32, Sizes
from megajax.core.config import Config
from megajax.core.config.mesh import MeshConfig
from megajax.core.config.model import encoder_layers
from megajax.core.config.optim import OptimConfig
from megajax.core.counts.layers import cross_layer
from megajax.core.counts.parameters import BYTES, dim_sizes, elements, parameters
from megajax.core.counts.vision import images_of_device, runs_backward, vectors


class EncoderBytes(NamedTuple):
    """The bytes that an encoder needs in a step."""

    weights: int = 0  # the unsharded matrices, in `train.dtype`
    gradients: int = 0  # unsharded, in fp32
    # Saved by its layers or, if these are frozen, by the mergers, until the decoder's backward pass
    # has ended.
    kept: int = 0
    buffers: int = 0  # in the backward pass of a layer
    vectors: int = 0  # vectors of a microbatch's images, on every device


def with_encoder(sizes: Sizes, moments: dict[str, Held], *, early: bool) -> dict[str, Held]:
    """Add the memory of images to the moments of `analysis/plan/memory.py`, and one more moment.

    - encoder: in the backward pass of an encoder layer, after the embedding's backward pass. The
      encoder's gradients reuse the memory of the decoder's passes; between the passes they have
      memory of their own if there is enough (`early`).

    DeepStack's inputs to layers are saved for recomputation. From the backward pass on, their
    gradient is in memory too. In the backward pass of a layer, so is a second gradient to add to
    it.
    """
    encoder, cross, vision = encoder_bytes(sizes), cross_bytes(sizes), sizes.config.vision
    assert vision is not None
    # With any ZeRO stage, the weights are gathered once per step and are already counted among
    # ZeRO's gathers.
    weights = encoder.weights if sizes.config.optim.shard == 'none' else 0
    # Up to ZeRO-1, gradients are not sharded, and the encoder's are already counted.
    counted = 0 if sizes.sums_early else encoder.gradients
    deep = len(vision.deepstack) * sizes.residual
    deep_of = {'loss': 1, 'layout': 2, 'backward': 3, 'experts': 3, 'embedding': 1}

    def with_images(name: str, held: Held) -> Held:
        of_layers = deep_of[name] * deep + (0 if name == 'embedding' else cross.kept)
        gradients = encoder.gradients if early and name == 'layout' else 0
        return dataclasses.replace(
            held,
            gathered_weights=held.gathered_weights + weights,
            gradients=max(0, held.gradients + gradients - counted),
            activations=held.activations + encoder.kept + encoder.vectors + of_layers,
        )

    found = {name: with_images(name, held) for name, held in moments.items()}
    buffers = {'backward': cross.buffers, 'experts': 0}
    for name in buffers.keys() & found.keys():
        in_layer = cross.mask + max(found[name].workspace, buffers[name])
        found[name] = dataclasses.replace(found[name], workspace=in_layer)
    ended = found['embedding']
    found['encoder'] = dataclasses.replace(
        ended,
        gradients=ended.gradients + encoder.gradients,
        activations=ended.activations - deep,
        workspace=encoder.buffers + encoder.vectors,
    )
    return found


def encoder_bytes(of_model: Sizes) -> EncoderBytes:
    """Return the bytes of a model's encoder; zeros if it has none."""
    config = of_model.config
    if config.vision is None:
        return EncoderBytes()
    sizes = dim_sizes(config.model)
    own = [x for _, x in parameters(config.model) if x.owner == 'encoder']
    learned = [x for x in own if not x.is_frozen]
    alone = Sizes(as_model(config), of_model.capability)
    again = alone.kinds[0].kept if config.train.recompute == 'full' else 0
    # The inputs and the outputs of a merger's norm and activation, each as large as its patches.
    of_mergers = 4 * (1 + len(config.vision.deepstack)) * alone.residual if learned else 0
    has_backward = runs_backward(config)
    return EncoderBytes(
        weights=BYTES[config.train.dtype]
        * sum(elements(x.dims, sizes) for x in own if x.is_matrix),
        gradients=FLOAT32 * sum(elements(x.dims, sizes) for x in learned),
        kept=alone.kept if has_backward else of_mergers,
        buffers=again + alone.kinds[0].in_backward if has_backward else 0,
        vectors=vectors(config).bytes,
    )


class CrossBytes(NamedTuple):
    """The bytes that cross-attention needs in a step."""

    kept: int = 0  # saved by its layers for the backward pass
    mask: int = 0  # mask of a layer's scores, in fp32, which XLA makes once before the layers
    buffers: int = 0  # in the backward pass of a layer


def cross_bytes(sizes: Sizes) -> CrossBytes:
    """Return the bytes of cross-attention; zeros without it.

    Cross-attention has no flash kernel. The keys and values of all layers are saved three times: as
    computed, normalized, and split by head.
    """
    config, model = sizes.config, sizes.model
    vision, layers, recompute = config.vision, model.num_cross_layers, config.train.recompute
    if vision is None or not layers:
        return CrossBytes()
    seen = vision.images * vision.vectors
    scores = sizes.tokens * seen * model.num_heads // sizes.layout.num_shards('N')
    softmax = (FLOAT32 + sizes.itemsize) * scores
    key_values = 3 * 2 * layers * sizes.keys * seen // sizes.length
    queries = (3 if model.qk_norm else 2) * sizes.queries  # and attention's output
    _, mlp = cross_layer(model)
    of_layer = 2 * (sizes.residual + sizes.whole) + queries + sum(up_and_hidden(sizes, mlp))
    of_layer += 0 if recompute == 'selective' else softmax
    return CrossBytes(
        kept=key_values + layers * (sizes.residual if recompute == 'full' else of_layer),
        mask=FLOAT32 * scores,
        buffers=(of_layer if recompute == 'full' else 0) + 2 * FLOAT32 * scores,
    )


def as_model(config: Config) -> Config:
    """Return a config whose model is the encoder, and whose sequences are a device's images.

    Patches attend only to patches of the same image, as tokens do within a document.
    """
    vision, train = config.vision, config.train
    assert vision is not None
    rows = images_of_device(config) * train.microbatches
    return config.model_copy(
        update={
            'model': encoder_layers(vision),
            'vision': None,
            'relevance': None,
            'lora': None,
            'mesh': MeshConfig(),
            'optim': OptimConfig(),
            'train': train.model_copy(
                update={'batch_size': rows, 'seq_len': vision.read_patches, 'overlap': 'none'}
            ),
            'data': config.data.model_copy(update={'document_mask': True}),
        }
    )
