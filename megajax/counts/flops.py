"""How many floating-point operations a training step has, counted without building it.

Those of matrix products, of all devices and the whole global batch; a multiply-add is two. Causal attention counts as the papers count it,
every query with every key, although a kernel may skip the half that the mask hides.

B sequences of the global batch, S sequence, D model, N query heads, K key/value heads, H head dim, F feed-forward, V vocabulary (padded).
"""

import dataclasses

from megajax.config.schema import Config, ModelConfig
from megajax.counts.parameters import NUM_SEGMENTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """One forward pass, by where it is, and what is computed more than once."""

    layers: int  # products with the weights of the layers
    attention: int  # scores and their product with the values
    head: int  # logits, and BERT's other heads
    recomputed: int  # in the backward pass; of BERT's heads also what each device of a tensor-parallel group repeats

    @property
    def model(self) -> int:
        """A forward and a backward pass, for the model FLOPs utilisation (MFU) of Chowdhery et al. (2022)."""
        return 3 * (self.layers + self.attention + self.head)

    @property
    def hardware(self) -> int:
        """All that is done, for the hardware FLOPs utilisation (HFU) of Korthikanti et al. (2022)."""
        return self.model + self.recomputed


def step_flops(config: Config, *, flash: bool | None = None) -> Flops:
    """Of a training step of `config`, with cuDNN's flash attention or without; by default as on a GPU."""
    model, batch, length = config.model, config.train.batch_size, config.train.seq_len
    tokens = batch * length
    down = 2 * tokens * model.num_layers * model.ffn_size * model.hidden_size
    layers = 2 * tokens * model.num_layers * _weights_of_layer(model)
    attention = 4 * tokens * length * model.num_layers * model.num_heads * model.head_dim
    flash = uses_flash(config) if flash is None else flash
    heads, repeated = _bert_heads(config)
    return Flops(
        layers=layers,
        attention=attention,
        head=2 * tokens * model.hidden_size * model.padded_vocab_size + heads,
        recomputed=_recomputed(config, layers - down, attention, flash) + repeated,
    )


def _bert_heads(config: Config) -> tuple[int, int]:
    """A forward pass of the dense layer of each token and of the two of the first token, and of both passes what devices repeat."""
    if config.model.causal:
        return 0, 0
    batch, D = config.train.batch_size, config.model.hidden_size
    of_tokens, of_sequences = 2 * batch * config.train.seq_len * D**2, 2 * batch * D * (D + NUM_SEGMENTS)
    others = config.mesh.model - 1
    repeated = of_sequences if config.mesh.sequence_parallel else of_tokens + of_sequences
    return of_tokens + of_sequences, 3 * others * repeated


def _weights_of_layer(model: ModelConfig) -> int:
    D, N, K, H, F = model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim, model.ffn_size
    return D * (N + 2 * K) * H + N * H * D + (3 if model.activation == 'swiglu' else 2) * D * F


def _recomputed(config: Config, needed: int, attention: int, flash: bool) -> int:
    # The backward pass needs no layer's result, so the last product of a layer is not computed again; the paper counts it.
    whole = needed + attention if config.train.recompute == 'full' else 0
    if flash:  # the backward pass runs the kernel again, and the backward kernel computes the scores again
        return whole + attention + attention // 2
    return whole + (attention // 2 if config.train.recompute == 'selective' else 0)  # the scores


def uses_flash(config: Config) -> bool:
    """Whether training on a GPU runs cuDNN's flash attention."""
    return config.model.dropout == 0 and fits_flash(config.train.dtype, config.model.head_dim)


def fits_flash(dtype: str, head_dim: int) -> bool:
    """cuDNN's flash attention needs a 16-bit dtype and a head dim of a multiple of 8 up to 128."""
    return dtype in ('bfloat16', 'float16') and head_dim % 8 == 0 and head_dim <= 128


def narayanan_flops(model: ModelConfig, *, batch_size: int, seq_len: int, recompute: bool) -> int:
    """96 B s l h^2 (1 + s/(6h) + V/(16 l h)) of Narayanan et al. (2021), section 5.1, with every layer computed again.

    Without, 72 B s l h^2 (1 + s/(6h) + V/(12 l h)). Holds for GPT: feed-forward of 4h, as many key/value heads as heads of h in all.
    """
    B, s, l, h, V = batch_size, seq_len, model.num_layers, model.hidden_size, model.padded_vocab_size
    layers = 24 * B * s * l * h**2 + 4 * B * s**2 * l * h
    return (4 if recompute else 3) * layers + 6 * B * s * h * V
