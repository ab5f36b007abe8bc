"""How often a device runs the parts of a model in a step.

The ticks of a pipeline's schedule are counted without its tables (`core/counts/schedule.py`).
"""

from typing import NamedTuple, Self

from megajax.core.config.schema import Config
from megajax.core.parallel.layout import Layout


class Runs(NamedTuple):
    """How often a device runs the parts of a model in a step."""

    layers: int  # the number of runs of one layer, over all layers of the device
    encoder: int  # number of runs of one layer of the vision encoder
    cross: int  # number of runs of one layer of cross-attention
    embedding: int
    head: int
    head_parts: int = 1  # number of stages that share the tokens of a head

    @classmethod
    def of_megatron(cls, config: Config) -> Self:
        """Return the runs on the Megatron rank that runs a part most often."""
        count = config.train.microbatches
        layers = layers_of_chunk(config) * config.mesh.virtual_stages
        return cls(layers * count, *_of_images(config), count, count)

    @classmethod
    def of_stages(cls, config: Config, layout: Layout | None = None) -> Self:
        """Return the runs on a device of lockstep stages, by default in the layout of `config`."""
        layout, count = layout or Layout.of(config), config.train.microbatches
        stages = layout.num_shards('L')
        passes = num_passes(stages, layout.chunks, count)
        layers = layers_of_chunk(config, layout)
        return cls(layers * passes, *_of_images(config), passes, count, stages)


def layers_of_chunk(config: Config, layout: Layout | None = None) -> int:
    """Return the number of layers in a chunk of a stage, which one tick runs."""
    layout = layout or Layout.of(config)
    return config.model.num_layers // (layout.num_shards('L') * layout.chunks)


def _of_images(config: Config) -> tuple[int, int]:
    """Return the number of runs of a layer of the vision encoder, and of one of cross-attention."""
    count, vision = config.train.microbatches, config.vision
    of_encoder = 0 if vision is None else vision.num_layers
    return of_encoder * count, config.model.num_cross_layers * count


def ticks(config: Config) -> int:
    """Return the number of ticks with a forward pass; as many ticks have a backward pass."""
    return num_passes(config.mesh.stages, config.mesh.virtual_stages, config.train.microbatches)


def num_passes(stages: int, chunks: int, microbatches: int) -> int:
    """Return the number of ticks of a step with a forward pass on some stage."""
    if chunks > 1:  # incomplete groups of microbatches take as many ticks as full ones
        microbatches = -(-microbatches // stages) * stages
    return chunks * microbatches + stages - 1
