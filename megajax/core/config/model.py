"""The section `model` of a config."""

import functools
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat

from megajax.core.config.experts import ExpertsConfig
from megajax.core.config.layer import LayerConfig, RopeScaling
from megajax.core.config.lora import LoraConfig
from megajax.core.config.section import (
    AngleDivisor,
    Count,
    Denominator,
    Elements,
    Fraction,
    Heads,
    Layers,
    Section,
    Tokens,
    follows,
    one_of,
)
from megajax.core.config.vision import Part, VisionConfig

# 128 x 8, as in the Megatron paper; the same on every mesh, so that a checkpoint fits all of them.
VOCAB_MULTIPLE = 1024

GATED = 'geglu', 'swiglu', 'clamped_swiglu'  # the activations that multiply by a gate


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
    window: Tokens | None = None
    """Sliding window: the number of tokens that a token attends to, itself included; null: all."""
    layers: Annotated[tuple[LayerConfig, ...], Field(strict=False)] = ()
    """A pattern of layers that repeats, for example [{repeat: 5, window: 1024}, {rope_theta: 1e6}].
    An entry replaces keys of the model for `repeat` layers.
    """
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    """Normalization in each sublayer (see norm_position) and before the LM head."""
    norm_position: Literal['before', 'after', 'both'] = 'before'
    """Where each sublayer has its norm: on its input (pre-norm), on its output before the residual
    addition (OLMo 2), or both (Gemma 3).
    """
    zero_centered_norm: bool = False
    """Whether norms multiply by 1 + w instead of w, and w begins at 0, as in Gemma 3."""
    activation: Literal['gelu', 'gelu_tanh', 'geglu', 'swiglu', 'clamped_swiglu'] = 'gelu_tanh'
    """Activation of the MLPs; geglu (with gelu_tanh) and swiglu have a gate in addition to the
    up-projection. clamped_swiglu limits both, as in gpt-oss.
    """
    experts: ExpertsConfig | None = None
    """A mixture of experts in place of each MLP, for example {count: 8, active: 2, ffn_size: 1024};
    null: MLPs of ffn_size.
    """
    position: Literal['learned', 'rope', 'mrope', 'rope_2d', 'none'] = 'learned'
    """Position encoding: a learned table, rotary embeddings, or none (NoPE). mrope: rotary by time,
    row and column, each in its part of the head dim (Qwen3-VL). rope_2d: rotary by row and column,
    for the vision encoder only.
    """
    mrope_section: Annotated[tuple[Count, Count, Count], Field(strict=False)] = (
        24,
        20,
        20,
    )
    """Rotary pairs of the head dim for time, row and column (mrope)."""
    rope_theta: AngleDivisor = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for example {type: llama3, factor: 8}."""
    rotary_fraction: Annotated[PositiveFloat, Field(le=1)] = 1.0
    """Share of the head dim that is rotated: its first dims, rounded down to whole dims (rope)."""
    qk_norm: Annotated[bool | Literal['all'], one_of('all')] = False
    """Whether queries and keys are normalized: per head (true), as in Qwen3, or over all heads at
    once (all), as in OLMo 2.
    """
    query_scale: PositiveFloat = follows(
        'head_dim ** -0.5',
        lambda data: max(data['head_dim'], 1) ** -0.5,  # a head dim of 0 is rejected later
    )
    """Factor of the attention scores."""
    attention_sinks: bool = False
    """Whether the softmax of attention has a learned logit per query head in its denominator, as in
    gpt-oss.
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
    norm_eps: Denominator = 1e-5
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
    def pattern(self) -> tuple[Self, ...]:
        """The config of each layer of the pattern; this config alone if all layers are equal."""
        if not self.layers:
            return (self,)
        configs = [self.changed(layers=(), **entry.replaced) for entry in self.layers]
        repeats = [entry.repeat for entry in self.layers]
        return tuple(
            config for config, repeat in zip(configs, repeats, strict=True) for _ in range(repeat)
        )

    @property
    def has_windows(self) -> bool:
        """Whether a layer has a sliding window."""
        return any(layer.window for layer in self.pattern)

    def layer_config(self, index: int) -> Self:
        """Return the config of the layer with this index, with the keys of the pattern."""
        pattern = self.pattern
        layer = pattern[index % len(pattern)]
        is_dense = layer.experts is not None and index < layer.experts.first_dense
        return layer.changed(experts=None) if is_dense else layer

    @property
    def layer_configs(self) -> list[Self]:
        """The config of each layer, in order."""
        return [self.layer_config(index) for index in range(self.num_layers)]

    @property
    def first_dense(self) -> int:
        """Number of layers before the first one with experts, if the pattern has experts."""
        return self.experts.first_dense if self.experts else 0

    @property
    def has_dense_and_experts(self) -> bool:
        """Whether some layers have experts and some have an MLP."""
        return self.experts is not None and (
            self.experts.first_dense > 0 or any(layer.experts is None for layer in self.pattern)
        )

    @property
    def causal(self) -> bool:
        """Whether a token attends only to itself and the tokens before it."""
        return self.attention == 'causal'

    @property
    def rotary_dim(self) -> int:
        """Number of dims of a head that are rotated, its first ones."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.position not in ('learned', 'none')

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
    def frozen_image_parts(self) -> tuple[Part, ...]:
        """The frozen parts of the vision encoder and its mergers; all of them with LoRA."""
        if self.vision is None:
            return ()
        return ('encoder', 'merger') if self.lora is not None else self.vision.freeze

    @property
    def has_frozen(self) -> bool:
        """Whether some parameters are frozen."""
        return (
            self.lora is not None
            or (self.vision is not None and bool(self.vision.freeze))
            or self.selects_with_bias
        )

    @property
    def selects_with_bias(self) -> bool:
        """Whether experts have a bias for their selection, which has no gradient."""
        return self.experts is not None and self.experts.selection_bias

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


@functools.cache
def encoder_layers(vision: VisionConfig) -> ModelConfig:
    """Return the config of a vision encoder's layers, as a bidirectional model's."""
    return ModelConfig(
        num_layers=vision.num_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_heads,
        ffn_size=vision.ffn_size,
        vocab_size=1,
        max_seq_len=vision.read_patches,
        attention='bidirectional',
        position='rope_2d',
        norm_eps=1e-6,
    )
