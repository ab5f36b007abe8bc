"""The section `optim` of a config."""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from megajax.core.config.section import (
    DecayRate,
    Denominator,
    Point,
    PointFromZero,
    Section,
)

ZeroStage = Literal['none', 'optimizer', 'gradients', 'weights']
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
ALIASES = {'zero1': 'optimizer', 'zero2': 'gradients', 'zero3': 'weights', 'fsdp': 'weights'}


def _zero_stage(value: Any) -> Any:
    if isinstance(value, bool):
        return 'optimizer' if value else 'none'
    return ALIASES.get(value, value) if isinstance(value, str) else value


class OptimConfig(Section):
    """The optimizer and its learning-rate schedule."""

    kind: Literal['adamw', 'muon'] = 'adamw'
    """Optimizer. muon: Muon (Jordan et al., 2024) for the matrices of layers, AdamW for embedding,
    head, encoder, biases and norms. See `megajax/core/train/muon.py`.
    """
    lr: PositiveFloat = 1.5e-4
    """Peak learning rate, reached at the end of warm-up."""
    min_lr: NonNegativeFloat = 1e-5
    """Learning rate at the end of the schedule."""
    warmup_steps: PointFromZero = 0
    """Length of the linear warm-up; fractions of a step are allowed."""
    warmup_init: NonNegativeFloat | None = None
    """Learning rate at the first step (0 in Megatron-LM); null: lr / (warmup_steps + 1)."""
    decay_steps: Point | None = None
    """Step at which the schedule reaches min_lr, where the rate stays; null: train.steps."""
    schedule: Literal['cosine', 'linear', 'constant', 'wsd', 'inverse_sqrt'] = 'cosine'
    """Learning-rate decay after warm-up, to min_lr; inverse_sqrt: lr sqrt(warmup_steps / step)."""
    wsd_steps: Point | None = None
    """Length of the decay with `schedule: wsd`; null: a fifth of the steps after warm-up."""
    wsd_decay: Literal['linear', 'cosine', 'exponential', 'minus_sqrt'] = 'linear'
    """Shape of the decay with `schedule: wsd`."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of all parameters except biases, norms, attention sinks, and the gates
    of cross-attention.
    """
    beta1: DecayRate = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: DecayRate = 0.999
    """Decay rate of AdamW's second moment."""
    eps: Denominator = 1e-8
    """Epsilon in AdamW's denominator."""
    momentum: DecayRate = 0.95
    """Decay rate of Muon's momentum."""
    nesterov: bool = True
    """Whether Muon's momentum is Nesterov's."""
    ns_steps: Annotated[PositiveInt, Field(le=100)] = 5
    """Newton-Schulz iterations with which Muon orthogonalizes a matrix."""
    ns_coefficients: Literal['quintic', 'dion', 'polar_express'] = 'quintic'
    """Polynomials of the Newton-Schulz iterations: Jordan's quintic in all of them (quintic), or
    one for each iteration: Dion's, which Megatron calls quintic (dion), or Polar Express (Amsel et
    al., 2025).
    """
    grad_clip: Denominator = 1.0
    """Global gradient norm above which gradients are clipped."""
    shard: Annotated[ZeroStage, BeforeValidator(_zero_stage)] = 'none'
    """ZeRO stage, i.e. what is sharded over `data` in addition to tensor parallelism: none;
    optimizer: the fp32 weights and AdamW moments (zero1); gradients: also the gradients (zero2);
    weights: also the weights in the compute dtype (zero3, fsdp). The names in parentheses are
    accepted as well. See `megajax/core/train/zero.py`.
    """
    reduce_dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype in which gradients are reduced over `data`."""
    moments_dtype: Literal['float32', 'bfloat16'] = 'float32'
    """Dtype in which the optimizer's moments are stored."""
