"""The sections of a config that describe a vision encoder: `vision` and `relevance`."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from megajax.core.config.section import (
    Count,
    CountFromZero,
    Elements,
    Heads,
    Layers,
    Patches,
    Pixels,
    Section,
    Tokens,
    Unit,
    follows,
)

Part = Literal['encoder', 'merger', 'decoder']
TEXTURE_CHANNELS = 13  # per pixel or region (`core/model/arr_coc/texture.py`)
FINEST = 20  # units along each side of a region at its finest level, so at most 400 tokens
DRAWN = 'words', 'lines'  # values of `data.corpus` for images that are drawn during training


def _rows_and_columns(value: Any) -> Any:
    """Return rows and columns of regions; a single number is split into a square."""
    if type(value) is not int or value < 1:
        return value
    side = math.isqrt(value)
    if side**2 != value:
        message = f'{value} is not a square number; give rows and columns of regions, as [4, 1]'
        raise PydanticCustomError('regions', '{message}', {'message': message})
    return side, side


class RelevanceConfig(Section):
    """Distribution of an image's tokens over its regions by their relevance (ARR-COC)."""

    regions: Annotated[tuple[Count, Count], Field(strict=False), BeforeValidator(_rows_and_columns)]
    """Rows and columns of regions in an image; a square number n means sqrt(n) of each."""
    total_tokens: Tokens
    """Tokens per image; each region gets 64 to 400 of them."""
    scorer_size: Elements = 256
    """Hidden units in each of the three scorers."""
    scorer_shards: Literal[1, 2] = 1
    """Number of shards of each scorer's hidden units; a device holds one or more."""

    @property
    def num_regions(self) -> int:
        """Number of regions in an image."""
        return math.prod(self.regions)

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of units in an image."""
        rows, columns = self.regions
        return rows * FINEST, columns * FINEST


class VisionConfig(Section):
    """The vision encoder, and how its embeddings enter the model."""

    num_layers: Layers
    """Number of encoder layers."""
    hidden_size: Elements
    """Width of the encoder."""
    num_heads: Heads
    """Number of attention heads in the encoder."""
    ffn_size: Elements = follows('4 * hidden_size', lambda data: 4 * data['hidden_size'])
    """Width of the hidden layer in the encoder's MLPs."""
    patch_size: Pixels = 16
    """Pixels along each side of a patch."""
    frames: Count = 1
    """Temporal patch size, in frames; a still image is repeated for each frame (Qwen3-VL: 2)."""
    merge_size: Patches = 2
    """Patches along each side of a unit; the patches of a unit are merged into one embedding."""
    positions: Patches = 48
    """Side length of the learned position table, which is interpolated to each image's size."""
    deepstack: Annotated[tuple[CountFromZero, ...], Field(strict=False)] = ()
    """Encoder layers whose outputs are also added after the model's first layers (DeepStack)."""
    fusion: Literal['tokens', 'cross_attention'] = 'tokens'
    """How image embeddings enter the model. tokens: they replace placeholder tokens.
    cross_attention: gated layers, one after every `cross_every`, attend to them (Flamingo, Llama
    3.2), and one token marks each image, which is visible to it and the later tokens of its
    sequence (of its document, with data.document_mask).
    """
    cross_every: Annotated[Count, Unit('layers')] = 4
    """Number of layers between two cross-attention layers."""
    cross_gate: float = 0.0
    """Initial value of the cross-attention gates. 0 leaves a pretrained text model unchanged; a
    model trained from scratch learns faster with open gates, such as 1.
    """
    images: Count = 1
    """Maximum number of images per sequence."""
    max_patches: Patches = 1024
    """Maximum image size; larger images are scaled down."""
    min_patches: Annotated[CountFromZero, Unit('patches')] = 0
    """Minimum image size; smaller images are scaled up. Qwen3-VL: 256 (65,536 pixels). Not
    supported with relevance, which scales every image to max_patches.
    """
    image_token: CountFromZero = 0
    """Id of the image placeholder token."""
    freeze: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    """Parts that are not trained: the encoder without its mergers, the mergers (merger), or
    everything else except cross-attention and relevance (decoder).
    """
    channels: Literal['rgb', 'texture'] = 'rgb'
    """Encoder input per pixel: its colors, or the channels of its texture."""
    relevance: RelevanceConfig | None = Field(default=None, exclude=True)
    """The section `relevance` of the config."""

    @property
    def pixels(self) -> int:
        """Number of values in a patch: three channels per pixel."""
        return 3 * self.patch_size**2

    @property
    def unit(self) -> int:
        """Number of patches that are merged into one embedding."""
        return self.merge_size**2

    @property
    def num_channels(self) -> int:
        """Number of channels per pixel that the encoder reads."""
        return 3 if self.channels == 'rgb' else TEXTURE_CHANNELS

    @property
    def vectors(self) -> int:
        """Maximum number of embeddings per image: its tokens in a sequence."""
        return self.relevance.total_tokens if self.relevance else self.max_patches // self.unit

    @property
    def read_patches(self) -> int:
        """Maximum number of patches per image that the encoder reads."""
        return self.vectors * self.unit

    @property
    def is_crossed(self) -> bool:
        """Whether cross-attention reads the embeddings, so that they are not in the sequence."""
        return self.fusion == 'cross_attention'

    @property
    def merged_size(self) -> int:
        """Width of a unit's patches, concatenated."""
        return self.unit * self.hidden_size
