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
TEXTURE_CHANNELS = 13  # of a pixel, or of a region (`core/model/arr_coc/texture.py`)
FINEST = 20  # units of patches along each side of a region, of which it has up to 400 tokens


class RopeScaling(Section):
    """Scaling of the rotary frequencies for sequences longer than those of pre-training.

    `linear` divides all frequencies by `factor`, `llama3` only the low ones. With llama3,
    wavelengths above `original_max_seq_len / low_freq_factor` tokens are stretched, wavelengths
    below `original_max_seq_len / high_freq_factor` do not change, and in between the factor grows
    smoothly. The defaults are Llama 3.1's.
    """

    type: Literal['linear', 'llama3']
    """Frequencies that are scaled: all (linear), or the low ones (llama3)."""
    factor: PositiveFloat
    """Divisor of the scaled frequencies."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor are stretched (llama3)."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor stay as they are (llama3)."""
    original_max_seq_len: Tokens = 8192
    """Longest sequence of the pre-training (llama3)."""


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

    regions: Annotated[tuple[Count, Count], Field(strict=False), BeforeValidator(_rows_and_columns)]
    """Rows and columns of regions in an image, or the number of regions of a square."""
    total_tokens: Tokens
    """Tokens of an image; a region has 64 to 400 of them."""
    scorer_size: Elements = 256
    """Hidden units of each of the three scorers."""
    scorer_shards: Literal[1, 2] = 1
    """Slots of each scorer, over which its hidden units are divided; a device has one or more."""

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

    num_layers: Layers
    """Number of the encoder's layers."""
    hidden_size: Elements
    """Width of the encoder."""
    num_heads: Heads
    """Number of the encoder's attention heads."""
    ffn_size: Elements = follows('4 * hidden_size', lambda data: 4 * data['hidden_size'])
    """Width of the hidden layer in the encoder's MLPs."""
    patch_size: Pixels = 16
    """Pixels along each side of a patch."""
    frames: Count = 1
    """Frames that a patch weighs; an image is shown to all of them (Qwen3-VL: 2)."""
    merge_size: Patches = 2
    """Patches along each side of a unit, which becomes one vector."""
    positions: Patches = 48
    """Side of the learned position table, which is interpolated to an image."""
    deepstack: Annotated[tuple[CountFromZero, ...], Field(strict=False)] = ()
    """Encoder layers whose outputs the first layers of the model add as well (DeepStack)."""
    fusion: Literal['tokens', 'cross_attention'] = 'tokens'
    """Where the vectors enter the model: in the places of tokens of the sequence, or as keys and
    values of gated layers, one after each `cross_every` layers (Flamingo, Llama 3.2). Then one
    token marks each image, which it and the later tokens of its document see.
    """
    cross_every: Annotated[Count, Unit('layers')] = 4
    """Layers of the model between two layers of cross-attention."""
    cross_gate: float = 0.0
    """Initial value of the gates of cross-attention: 0 leaves a model of text as it is, and a model
    that learns from nothing learns faster where they are open, as at 1.
    """
    images: Count = 1
    """Largest number of images in a row of the batch."""
    max_patches: Patches = 1024
    """Largest size of an image; a larger one is reduced."""
    min_patches: Annotated[CountFromZero, Unit('patches')] = 0
    """Smallest size of an image; a smaller one is enlarged. Qwen3-VL: 256 (65,536 pixels)."""
    image_token: CountFromZero = 0
    """Id of the token that stands where image vectors are."""
    freeze: Annotated[tuple[Part, ...], Field(strict=False)] = ()
    """Parts without gradients, weight decay and moments: the encoder without its mergers, the
    mergers, and all the rest but cross-attention and relevance (decoder).
    """
    channels: Literal['rgb', 'texture'] = 'rgb'
    """Input of the encoder for each pixel: its colors, or the channels of its texture."""
    relevance: RelevanceConfig | None = Field(default=None, exclude=True)
    """The section `relevance` of the config, which stands beside this one."""

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
    """The model; GPT-2, Megatron's GPT and BERT, Llama, Qwen3 and OLMo 2 differ in these keys."""

    num_layers: Layers
    """Number of transformer layers."""
    hidden_size: Elements
    """Width of the residual stream."""
    num_heads: Heads
    """Number of query heads."""
    num_kv_heads: Heads = follows('num_heads', lambda data: data['num_heads'])
    """Number of key/value heads; fewer than num_heads: grouped-query attention."""
    head_dim: Elements = follows(
        'hidden_size // num_heads', lambda data: data['hidden_size'] // data['num_heads']
    )
    """Width of a head."""
    ffn_size: Elements = follows('4 * hidden_size', lambda data: 4 * data['hidden_size'])
    """Width of the hidden layer in the MLPs."""
    vocab_size: Count
    """Entries of the tokenizer, before padding to a multiple of 1024."""
    max_seq_len: Tokens
    """Rows of the learned position table, and the limit of train.seq_len."""
    objective: Literal['next_token', 'masked_lm'] = 'next_token'
    """Tokens to predict, the next or masked ones; masked_lm adds BERT's heads."""
    attention: Literal['causal', 'bidirectional'] = follows(
        "'causal' if objective == 'next_token' else 'bidirectional'",
        lambda data: 'causal' if data['objective'] == 'next_token' else 'bidirectional',
    )
    """Tokens that a token attends to: those up to itself, or all."""
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    """Normalisation in each sublayer (norm_position) and before the head."""
    norm_position: Literal['before', 'after', 'both'] = 'before'
    """Norm of each sublayer: of its input, of its output before that is added to the residual
    stream (OLMo 2), or one of each (Gemma 2).
    """
    activation: Literal['gelu', 'gelu_tanh', 'geglu', 'swiglu'] = 'gelu_tanh'
    """Activation of the MLPs; geglu (whose GELU is gelu_tanh) and swiglu have a gate beside the
    up-projection.
    """
    position: Literal['learned', 'rope', 'mrope', 'rope_2d'] = 'learned'
    """Position encoding: a learned table, or rotary angles; mrope: angles of time, row and column,
    each for its part of the head dim (Qwen3-VL); rope_2d: of row and column, in the vision encoder
    alone.
    """
    mrope_section: Annotated[tuple[Count, Count, Count], Field(strict=False)] = (
        24,
        20,
        20,
    )
    """Pairs of the head dim that turn with the time, the row and the column (mrope)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for example {type: llama3, factor: 8}."""
    qk_norm: bool | Literal['all'] = False
    """Whether queries and keys are normalised: over head_dim (true), as Qwen3 does, or over all
    heads at once (all), as OLMo 2 does.
    """
    bias: bool = True
    """Whether linear layers but the LM head have biases; BERT's heads always do."""
    qkv_bias: bool = follows('bias', lambda data: data['bias'])
    """Whether the query, key and value projections have biases; Qwen2 has no others."""
    tie_embeddings: bool = True
    """Whether the LM head is the embedding table."""
    dropout: Fraction = 0.0
    """Dropout rate after the embedding and each sublayer."""
    attention_dropout: Fraction = follows('dropout', lambda data: data['dropout'])
    """Dropout rate of the attention probabilities; flash attention needs 0."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the norms, added to the variance or mean square."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights. Projections into the residual stream are additionally
    scaled by 1/sqrt(2 num_layers).
    """
    vision: VisionConfig | None = Field(default=None, exclude=True)
    """The section `vision` of the config, which stands beside this one."""
    lora: LoraConfig | None = Field(default=None, exclude=True)
    """The section `lora` of the config, which stands beside this one."""

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.attention == 'causal'

    @property
    def has_dropout(self) -> bool:
        """Whether a training step draws masks of dropout."""
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def is_gated(self) -> bool:
        """Whether the MLPs have a gate beside the up-projection, in one product with it."""
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
        """Number of norms of a layer, without those of queries and keys."""
        return 2 * (self.norms_inputs + self.norms_outputs)

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norm of queries and keys is over all heads at once."""
        return self.qk_norm == 'all'

    @property
    def is_bert(self) -> bool:
        """Whether the model predicts masked tokens and sentence order."""
        return self.objective == 'masked_lm'

    @property
    def is_decoder_frozen(self) -> bool:
        """Whether nothing of the decoder but adapters is learned (`vision.freeze`, `lora`)."""
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
        """Number of layers of cross-attention, in addition to `num_layers`."""
        vision = self.vision
        return (
            0 if vision is None or not vision.is_crossed else self.num_layers // vision.cross_every
        )

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads
