"""The bytes of a vision encoder on each GPU, which has whole weights and some of the images."""

from typing import NamedTuple

from megajax.config import Config
from megajax.config.schema import MeshConfig, OptimConfig
from megajax.counts.parameters import dim_sizes, num_elements, parameters
from megajax.counts.vision import images_of_device, vectors
from megajax.plan.sizes import BYTES, FLOAT32, Sizes


class EncoderBytes(NamedTuple):
    """The bytes of an encoder in a step."""

    weights: int = 0  # its matrices in `train.dtype`, whole
    gradients: int = 0  # whole, in fp32
    kept: int = 0  # by its layers for the backward pass, until that of the decoder has ended
    buffers: int = 0  # in the backward pass of a layer
    vectors: int = 0  # of the images of a microbatch, on every device


def encoder_bytes(config: Config) -> EncoderBytes:
    """Return the bytes of the encoder of a config; nothing without one."""
    if config.vision is None:
        return EncoderBytes()
    sizes = dim_sizes(config.model)
    own = [x for _, x in parameters(config.model) if x.is_of_encoder]
    learned = [x for x in own if not x.is_frozen]
    alone = Sizes(as_model(config))
    again = alone.kept_by_layer if config.train.recompute == 'full' else 0
    return EncoderBytes(
        weights=BYTES[config.train.dtype] * sum(num_elements(x, sizes) for x in own if x.is_matrix),
        gradients=FLOAT32 * sum(num_elements(x, sizes) for x in learned),
        kept=alone.kept if learned else 0,
        buffers=again + alone.buffers_of_layer if learned else 0,
        vectors=vectors(config).bytes,
    )


def as_model(config: Config) -> Config:
    """Return a config whose model is the encoder, and whose rows are the images of a device.

    The patches of an image attend to one another alone, as the tokens of a document do.
    """
    vision, train = config.vision, config.train
    assert vision is not None
    rows = images_of_device(config) * train.microbatches
    return config.model_copy(
        update={
            'model': vision.blocks,
            'vision': None,
            'relevance': None,
            'mesh': MeshConfig(),
            'optim': OptimConfig(),
            'train': train.model_copy(
                update={'batch_size': rows, 'seq_len': vision.read_patches, 'overlap': 'none'}
            ),
            'data': config.data.model_copy(update={'document_mask': True}),
        }
    )
