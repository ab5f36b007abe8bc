"""The floating-point operations of a training step, counted without building it.

The counts include only matmuls, on all devices and for the entire global batch; a multiply-add is
two FLOPs. Causal attention is counted as in the papers: every query with every key, although a
kernel may skip the masked half. Work of idle pipeline stages is not counted.
"""

import dataclasses

from megajax.core.config.model import ModelConfig
from megajax.core.config.schema import Config
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.parameters import dim_sizes, elements, shape_of
from megajax.core.counts.products import products
from megajax.core.parallel.layout import CONTEXT, STAGE, Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """The FLOPs of a forward pass, by part of the model, and the FLOPs of repeated computation."""

    layers: int  # matmuls with the weights of the layers
    attention: int  # scores, and their multiplication with the values
    head: int  # logits, and BERT's other heads
    # Gradients that a step does not compute: gradients of frozen weights, of the input of a vision
    # encoder's first matmul, and all gradients of a frozen encoder.
    left_out: int
    # Recomputation in the backward pass, and the matmuls of BERT's heads that are repeated on each
    # device of a tensor-parallel group.
    recomputed: int

    @property
    def model(self) -> int:
        """The FLOPs of a forward and a backward pass, without recomputation.

        They are the FLOPs in the model FLOPs utilization (MFU) of Chowdhery et al. (2022).
        """
        return 3 * (self.layers + self.attention + self.head) - self.left_out

    @property
    def hardware(self) -> int:
        """All FLOPs that are executed.

        They are the FLOPs in the hardware FLOPs utilization (HFU) of Korthikanti et al. (2022).
        """
        return self.model + self.recomputed


def step_flops(config: Config, *, flash: bool | None = None, once: Flops | None = None) -> Flops:
    """Count the FLOPs of a training step of `config`, with or without cuDNN's flash attention.

    By default, `flash` is true if the step uses flash attention on a GPU. `once` has the result of
    `flops_once`, if it is known.
    """
    flash = uses_flash(config) if flash is None else flash
    layout, once = _of_each_product(Layout.of(config)), once or flops_once(config, flash=flash)
    on_a_device = products(config, flash=flash, layout=layout)
    executed = layout.num_devices * sum(x.times * x.flops for x in on_a_device)
    return dataclasses.replace(once, recomputed=executed - once.model)


def flops_once(config: Config, *, flash: bool) -> Flops:
    """Count the FLOPs of a step without those that are repeated.

    They are the same in all layouts of a model with the same batch. Empty slots of experts with a
    capacity are not work of the model.
    """
    config = _without_empty_slots(config)
    forward = {'layers': 0, 'attention': 0, 'head': 0}
    undivided = products(config, flash=flash, layout=Layout())
    for product in undivided:
        if product.phase == 'forward':
            forward[product.where] += product.times * product.flops
    gradients = {product.name for product in undivided if product.phase == 'backward'}
    left_out = sum(
        x.times * x.flops
        for x in undivided
        for of_which in (' input', ' weight')
        # The gradients of attention have the name of its forward pass.
        if x.phase == 'forward'
        and (x.name if x.where == 'attention' else x.name + of_which) not in gradients
    )
    return Flops(**forward, left_out=left_out, recomputed=0)


def _without_empty_slots(config: Config) -> Config:
    """Return the config without a capacity that exceeds an equal share of the tokens."""
    experts = config.model.experts
    if experts is None or experts.capacity is None or experts.capacity <= 1:
        return config
    model = config.model.changed(experts=experts.changed(capacity=None, capacity_group=None))
    return config.model_copy(update={'model': model})


def _of_each_product(layout: Layout) -> Layout:
    """Return the layout without pipeline stages and context shards: each matmul counts once.

    Idle pipeline ticks and padded heads are not work, and context shards skip part of the causally
    masked scores.
    """
    axes = tuple((letter, axes) for letter, axes in layout.axes if letter not in 'LΔΛS')
    sizes = tuple((axis, size) for axis, size in layout.sizes if axis not in (STAGE, CONTEXT))
    return dataclasses.replace(layout, axes=axes, sizes=sizes, chunks=1)


def is_gpt(model: ModelConfig) -> bool:
    """Whether the formula of Narayanan et al. (2021) holds for a model."""
    if (model.experts, model.lora, model.vision) != (None, None, None) or model.has_windows:
        return False
    D, F, *heads = (elements(dims, dim_sizes(model)) for dims in ('D', 'F', 'NH', 'KH'))
    return F == 4 * D and heads == [D, D] and not model.is_bert and not model.is_gated


def narayanan_flops(model: ModelConfig, *, batch_size: int, seq_len: int, recompute: bool) -> int:
    """Count the FLOPs of a step by the formula of Narayanan et al. (2021), section 5.1.

    It is 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) with full recomputation, and without it
    72 B s l h^2 (1 + s/(6h) + V/(12 l h)). It holds for GPT: a feed-forward size of 4h, as many
    key/value heads as heads, and head dims that sum to h.
    """
    B, s, (l, h, V) = batch_size, seq_len, shape_of('LDV', dim_sizes(model))
    layers = 24 * B * s * l * h**2 + 4 * B * s**2 * l * h
    return (4 if recompute else 3) * layers + 6 * B * s * h * V
