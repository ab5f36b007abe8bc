"""The sections of a config that describe the model: `model` and `vision`."""

import math
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic_core import PydanticCustomError

# 128 x 8, as in the Megatron paper; the same on every mesh, so that a checkpoint fits all of them.
VOCAB_MULTIPLE = 1024

Part = Literal['encoder', 'merger', 'decoder']
TEXTURE_CHANNELS = 13  # of a pixel, or of a region (`model/texture.py`)
FINEST = 20  # units of patches along each side of a region, of which it has up to 400 tokens

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen group of keys that rejects unknown keys and values of another type.

    `8.0` or `'8'` is not accepted for 8.
    """

    model_config = ConfigDict(frozen=True, extra='forbid', strict=True, allow_inf_nan=False)


class RopeScaling(Section):
    """Scaling of the rotary frequencies for sequences longer than those of pre-training.

    `linear` divides all frequencies by `factor`, `llama3` only the low ones. With llama3,
    wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched, wavelengths
    below `original_max_seq_len / high_freq_factor` do not change, and in between the factor grows
    smoothly. The defaults are Llama 3.1's.
    """

    type: Literal['linear', 'llama3']
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: PositiveInt = 8192


def _rows_and_columns(value: Any) -> Any:
    """Return rows and columns of regions; a number of regions is that of a square."""
    if type(value) is not int or value < 1:
        return value
    side = math.isqrt(value)
    if side**2 != value:
        message = f'{value} is not a square number; give rows and columns of regions, as [4, 1]'
        raise PydanticCustomError('regions', '{message}', {'message': message})
    return side, side


class RelevanceConfig(Section):
    """The relevance of an image's regions, by which its tokens are distributed (ARR-COC)."""

    # Rows and columns of regions in an image, or the number of regions of a square.
    regions: Annotated[
        tuple[PositiveInt, PositiveInt], Field(strict=False), BeforeValidator(_rows_and_columns)
    ]
    total_tokens: PositiveInt  # of an image; a region has 64 to 400 of them
    scorer_size: PositiveInt = 256  # hidden units of each of the three scorers
    # Slots of each scorer, over which its hidden units are divided; a device has one slot or more.
    scorer_shards: Literal[1, 2] = 1

    @property
    def num_regions(self) -> int:
        """Number of regions of an image."""
        return math.prod(self.regions)

    @property
    def units(self) -> tuple[int, int]:
        """Rows and columns of the units of patches in an image."""
        rows, columns = self.regions
        return rows * FINEST, columns * FINEST


class VisionConfig(Section):
    """The vision encoder, and where its vectors enter the model."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    ffn_size: PositiveInt = Field(default_factory=lambda data: 4 * data['hidden_size'])
    patch_size: PositiveInt = 16  # pixels along each side of a patch
    frames: PositiveInt = 1  # that a patch weighs; an image is shown to all of them (Qwen3-VL: 2)
    merge_size: PositiveInt = 2  # patches along each side of a unit, which becomes one vector
    positions: PositiveInt = 48  # side of the learned table, which is interpolated to an image
    # Layers of the encoder whose outputs the first layers of the model add as well (DeepStack).
    deepstack: Annotated[tuple[NonNegativeInt, ...], Field(strict=False)] = ()
    # Where the vectors enter the model: in the places of tokens of the sequence, or as keys and
    # values of gated layers, one after each `cross_every` layers (Flamingo, Llama 3.2). Then one
    # token marks each image, which it and the later tokens of its document see.
    fusion: Literal['tokens', 'cross_attention'] = 'tokens'
    cross_every: PositiveInt = 4
    # Initial value of the gates of cross-attention: 0 leaves a model of text as it is, and a model
    # that learns from nothing learns faster where they are open, as at 1.
    cross_gate: float = 0.0
    images: PositiveInt = 1  # at most, in a row of the batch
    max_patches: PositiveInt = 1024  # of an image
    # Of an image: a smaller one is enlarged. Qwen3-VL's 65,536 pixels are 256 patches.
    min_patches: NonNegativeInt = 0
    image_token: NonNegativeInt = 0  # the token that stands where image vectors are
    # Parts without gradients, weight decay and moments: the encoder without its mergers, the
    # mergers, and all the rest but cross-attention and relevance.
    freeze: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    # What the encoder reads of a pixel: its colors, or the channels of its texture.
    channels: Literal['rgb', 'texture'] = 'rgb'
    # The section `relevance` of the config, which stands beside this one.
    relevance: RelevanceConfig | None = Field(default=None, exclude=True)

    @property
    def pixels(self) -> int:
        """Numbers of a patch: three channels of each of its pixels."""
        return 3 * self.patch_size**2

    @property
    def unit(self) -> int:
        """Number of patches that become one vector."""
        return self.merge_size**2

    @property
    def num_channels(self) -> int:
        """Number of channels of a pixel that the encoder reads."""
        return 3 if self.channels == 'rgb' else TEXTURE_CHANNELS

    @property
    def vectors(self) -> int:
        """Number of vectors of an image, at most: its tokens in a sequence."""
        return self.relevance.total_tokens if self.relevance else self.max_patches // self.unit

    @property
    def read_patches(self) -> int:
        """Number of patches of an image that the encoder reads, at most."""
        return self.vectors * self.unit

    @property
    def is_crossed(self) -> bool:
        """Whether cross-attention reads the vectors, and the sequence has none of them."""
        return self.fusion == 'cross_attention'

    @property
    def merged_size(self) -> int:
        """Width of the merged patches of a unit."""
        return self.unit * self.hidden_size

    @cached_property
    def blocks(self) -> 'ModelConfig':
        """The layers of the encoder, as those of a model that looks both ways."""
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            ffn_size=self.ffn_size,
            vocab_size=1,
            max_seq_len=self.read_patches,
            attention='bidirectional',
            position='rope_2d',
            norm_eps=1e-6,
        )


class ModelConfig(Section):
    """The model; GPT-2, Megatron's GPT and BERT, Llama and Qwen3 differ in these keys alone."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    num_heads: PositiveInt
    # Fewer than num_heads: grouped-query attention.
    num_kv_heads: PositiveInt = Field(default_factory=lambda data: data['num_heads'])
    head_dim: PositiveInt = Field(
        default_factory=lambda data: data['hidden_size'] // data['num_heads']
    )
    ffn_size: PositiveInt = Field(default_factory=lambda data: 4 * data['hidden_size'])
    vocab_size: PositiveInt  # entries of the tokenizer, before padding
    max_seq_len: PositiveInt  # rows of the learned position table, and the limit of train.seq_len
    objective: Literal['next_token', 'masked_lm'] = 'next_token'  # masked_lm adds BERT's heads
    # Tokens that a token attends to: those up to itself, or all. Default: as the objective needs.
    attention: Literal['causal', 'bidirectional'] = Field(
        default_factory=lambda data: (
            'causal' if data['objective'] == 'next_token' else 'bidirectional'
        )
    )
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    activation: Literal['gelu', 'gelu_tanh', 'swiglu'] = 'gelu_tanh'
    # mrope: rotary angles of time, row and column, each for its part of the head dim (Qwen3-VL).
    # rope_2d: of row and column; only the vision encoder has it.
    position: Literal['learned', 'rope', 'mrope', 'rope_2d'] = 'learned'
    # Of mrope: pairs of the head dim that turn with the time, the row and the column.
    mrope_section: Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Field(strict=False)] = (
        24,
        20,
        20,
    )
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None  # for example {type: llama3, factor: 8}
    qk_norm: bool = False  # normalise queries and keys over head_dim, as Qwen3 does
    bias: bool = True  # in every linear layer but the LM head; BERT's heads always have a bias
    # Bias of the query, key and value projections; Qwen2 has no other bias.
    qkv_bias: bool = Field(default_factory=lambda data: data['bias'])
    tie_embeddings: bool = True  # the LM head is the embedding table
    dropout: Fraction = 0.0  # after the embedding, the attention probabilities and each sublayer
    norm_eps: PositiveFloat = 1e-5
    # Projections into the residual stream are additionally scaled by 1/sqrt(2 num_layers).
    init_std: PositiveFloat = 0.02
    # The section `vision` of the config, which stands beside this one.
    vision: VisionConfig | None = Field(default=None, exclude=True)

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.attention == 'causal'

    @property
    def is_bert(self) -> bool:
        """Whether the model predicts masked tokens and sentence order."""
        return self.objective == 'masked_lm'

    @property
    def is_decoder_frozen(self) -> bool:
        """Whether `vision.freeze` names the decoder, of which nothing is learned then."""
        return self.vision is not None and 'decoder' in self.vision.freeze

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of 1024."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_cross_layers(self) -> int:
        """Number of layers of cross-attention, in addition to `num_layers`."""
        vision = self.vision
        return (
            0 if vision is None or not vision.is_crossed else self.num_layers // vision.cross_every
        )

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads
