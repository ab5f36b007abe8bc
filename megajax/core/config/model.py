"""The sections of a config that describe the model: `model`, `vision` and `relevance`."""

import math
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic_core import PydanticCustomError

from megajax.core.config.lora import LoraConfig
from megajax.core.config.section import (
    Count,
    CountFromZero,
    Elements,
    Fraction,
    Heads,
    Layers,
    Patches,
    Pixels,
    Section,
    Tokens,
    Unit,
    follows,
)

# 128 x 8, as in the Megatron paper; the same on every mesh, so that a checkpoint fits all of them.
VOCAB_MULTIPLE = 1024

GATED = 'geglu', 'swiglu'  # the activations that multiply by a gate

Part = Literal['encoder', 'merger', 'decoder']
TEXTURE_CHANNELS = 13  # per pixel or region (`core/model/arr_coc/texture.py`)
FINEST = 20  # units along each side of a region, which gives it at most 400 tokens


class RopeScaling(Section):
    """Scaling of the rotary frequencies for sequences longer than in pre-training.

    `linear` divides all frequencies by `factor`, `llama3` only the low ones. With llama3,
    wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched, wavelengths
    below `original_max_seq_len / high_freq_factor` do not change, and in between the factor grows
    smoothly. The defaults are Llama 3.1's.
    """

    type: Literal['linear', 'llama3']
    """Which frequencies are scaled: all (linear), or the low ones (llama3)."""
    factor: PositiveFloat
    """Divisor of the scaled frequencies."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched (llama3)."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor are unchanged (llama3)."""
    original_max_seq_len: Tokens = 8192
    """Longest sequence in pre-training (llama3)."""


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
    """Side of the learned position table, which is interpolated to the size of each image."""
    deepstack: Annotated[tuple[CountFromZero, ...], Field(strict=False)] = ()
    """Encoder layers whose outputs are also added in the first layers of the model (DeepStack)."""
    fusion: Literal['tokens', 'cross_attention'] = 'tokens'
    """How image embeddings enter the model. tokens: they replace placeholder tokens.
    cross_attention: gated layers, one after every `cross_every`, attend to them (Flamingo, Llama
    3.2), and one token marks each image, which is visible to it and the later tokens of its
    document.
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
    """Minimum image size; smaller images are scaled up. Qwen3-VL: 256 (65,536 pixels)."""
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
        """Whether cross-attention reads the embeddings, which are then not part of the sequence."""
        return self.fusion == 'cross_attention'

    @property
    def merged_size(self) -> int:
        """Width of a unit's patches, concatenated."""
        return self.unit * self.hidden_size

    @cached_property
    def blocks(self) -> 'ModelConfig':
        """The encoder's layers, as the config of a bidirectional model."""
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
    """The model architecture: GPT-2, Megatron's GPT and BERT, Llama, Qwen3, OLMo 2 and others."""

    num_layers: Layers
    """Number of transformer layers."""
    hidden_size: Elements
    """Width of the residual stream."""
    num_heads: Heads
    """Number of query heads."""
    num_kv_heads: Heads = follows('num_heads', lambda data: data['num_heads'])
    """Number of key/value heads; fewer than num_heads give grouped-query attention."""
    head_dim: Elements = follows(
        'hidden_size // num_heads', lambda data: data['hidden_size'] // data['num_heads']
    )
    """Width of an attention head."""
    ffn_size: Elements = follows('4 * hidden_size', lambda data: 4 * data['hidden_size'])
    """Width of the hidden layer in the MLPs."""
    vocab_size: Count
    """Number of entries in the tokenizer, before padding to a multiple of 1024."""
    max_seq_len: Tokens
    """Longest sequence: size of the learned position table, and the limit of train.seq_len."""
    objective: Literal['next_token', 'masked_lm'] = 'next_token'
    """Tokens to predict: the next one, or masked ones; masked_lm adds BERT's heads."""
    attention: Literal['causal', 'bidirectional'] = follows(
        "'causal' if objective == 'next_token' else 'bidirectional'",
        lambda data: 'causal' if data['objective'] == 'next_token' else 'bidirectional',
    )
    """Tokens that a token attends to: itself and earlier ones (causal), or all (bidirectional)."""
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    """Normalization in each sublayer (see norm_position) and before the LM head."""
    norm_position: Literal['before', 'after', 'both'] = 'before'
    """Place of each sublayer's norm: on its input (pre-norm), on its output before the residual
    addition (OLMo 2), or both (Gemma 2).
    """
    zero_centered_norm: bool = False
    """Whether RMSNorms multiply by 1 + w instead of w, and w begins at 0, as in Gemma 3."""
    activation: Literal['gelu', 'gelu_tanh', 'geglu', 'swiglu'] = 'gelu_tanh'
    """Activation of the MLPs; geglu (with gelu_tanh) and swiglu have a gate in addition to the
    up-projection.
    """
    position: Literal['learned', 'rope', 'mrope', 'rope_2d'] = 'learned'
    """Position encoding: a learned table or rotary embeddings. mrope: rotary by time, row and
    column, each in its part of the head dim (Qwen3-VL). rope_2d: rotary by row and column, for the
    vision encoder only.
    """
    mrope_section: Annotated[tuple[Count, Count, Count], Field(strict=False)] = (
        24,
        20,
        20,
    )
    """Rotary pairs of the head dim for time, row and column (mrope)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for example {type: llama3, factor: 8}."""
    rotary_fraction: Annotated[PositiveFloat, Field(le=1)] = 1.0
    """Share of the head dim that is rotated: its first dims, rounded down to whole dims (rope)."""
    qk_norm: bool | Literal['all'] = False
    """Whether queries and keys are normalized: per head (true), as in Qwen3, or over all heads at
    once (all), as in OLMo 2.
    """
    bias: bool = True
    """Whether linear layers have biases, except for the LM head; BERT's heads always have them."""
    qkv_bias: bool = follows('bias', lambda data: data['bias'])
    """Whether the query, key and value projections have biases; Qwen2 has only these."""
    tie_embeddings: bool = True
    """Whether the LM head is the embedding table."""
    embedding_scale: PositiveFloat = 1.0
    """Factor of the embeddings of tokens, not of a tied LM head; sqrt(hidden_size) in Gemma 3."""
    dropout: Fraction = 0.0
    """Dropout rate after the embedding and each sublayer."""
    attention_dropout: Fraction = follows('dropout', lambda data: data['dropout'])
    """Dropout rate on the attention probabilities; flash attention needs 0."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon that norms add to the variance or the mean square."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights. Projections into the residual stream are also
    scaled by 1/sqrt(2 num_layers).
    """
    vision: VisionConfig | None = Field(default=None, exclude=True)
    """The section `vision` of the config."""
    lora: LoraConfig | None = Field(default=None, exclude=True)
    """The section `lora` of the config."""

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.attention == 'causal'

    @property
    def rotary_dim(self) -> int:
        """Number of dims of a head that are rotated, its first ones."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def has_dropout(self) -> bool:
        """Whether a training step draws dropout masks."""
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs have a gate, which is in one matmul with the up-projection."""
        return self.activation in GATED

    @property
    def norms_inputs(self) -> bool:
        """Whether the input of a sublayer is normalized."""
        return self.norm_position != 'after'

    @property
    def norms_outputs(self) -> bool:
        """Whether the output of a sublayer is normalized."""
        return self.norm_position != 'before'

    @property
    def norms_of_layer(self) -> int:
        """Number of norms in a layer, without QK-norms."""
        return 2 * (self.norms_inputs + self.norms_outputs)

    @property
    def norms_all_heads(self) -> bool:
        """Whether QK-norm is over all heads at once."""
        return self.qk_norm == 'all'

    @property
    def is_bert(self) -> bool:
        """Whether the model predicts masked tokens and sentence order."""
        return self.objective == 'masked_lm'

    @property
    def is_decoder_frozen(self) -> bool:
        """Whether the decoder is frozen, except for adapters (`vision.freeze`, `lora`)."""
        return self.lora is not None or (
            self.vision is not None and 'decoder' in self.vision.freeze
        )

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters are frozen."""
        return self.lora is not None or (self.vision is not None and bool(self.vision.freeze))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table: `vocab_size` rounded up to a multiple of 1024."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def num_cross_layers(self) -> int:
        """Number of cross-attention layers, in addition to `num_layers`."""
        vision = self.vision
        return (
            0 if vision is None or not vision.is_crossed else self.num_layers // vision.cross_every
        )

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads
