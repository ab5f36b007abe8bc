"""How many floating-point operations a training step has, counted without building it.

Those of matrix products, of all devices and the whole global batch; a multiply-add is two. Causal attention counts as the papers count it,
every query with every key, although a kernel may skip the half that the mask hides.
"""

import dataclasses

from megajax.config.schema import Config, ModelConfig
from megajax.counts.products import products
from megajax.parallel.layout import Layout


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
    """Of a training step of `config`, with cuDNN's flash attention or without.

    By default as on a GPU.
    """
    flash = uses_flash(config) if flash is None else flash
    layout = Layout.of(config)
    forward = {'layers': 0, 'attention': 0, 'head': 0}
    for one in products(config, flash=flash, layout=Layout()):
        if one.phase == 'forward':
            forward[one.where] += one.times * one.flops
    on_a_device = sum(one.times * one.flops for one in products(config, flash=flash, layout=layout))
    every = on_a_device * layout.num_devices
    return Flops(**forward, recomputed=every - 3 * sum(forward.values()))


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
    B, s, l, h, V = (
        batch_size,
        seq_len,
        model.num_layers,
        model.hidden_size,
        model.padded_vocab_size,
    )
    layers = 24 * B * s * l * h**2 + 4 * B * s**2 * l * h
    return (4 if recompute else 3) * layers + 6 * B * s * h * V
