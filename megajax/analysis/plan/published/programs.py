"""Programs of published throughputs that `--program` does not name.

A slowdown is fitted to the rows of its program that are not held out (`benchmarks/fit_gpus.py`).
"""

import dataclasses

from megajax.analysis.plan.overlap import NOTHING, HiddenBy
from megajax.analysis.plan.programs import FSDP, FSDP_IN_JAX, MEGATRON, TORCHTITAN
from megajax.core.config import Config
from megajax.core.counts.collective import Expected


def _hidden_by_weight_gradients(collective: Expected, _: Config) -> HiddenBy:
    """Return the overlap of Megatron-LM in 2022."""
    site = collective.site
    parts = {'attention': 'qkv', 'mlp': 'up', 'head': 'head'}
    if site.phase != 'backward' or site.axis != 'model' or site.name not in parts:
        return NOTHING
    return HiddenBy(1.0, (f'{parts[site.name]} weight',))


# As in the papers of 2019 to 2022: unfused attention, fp16 gradients, no overlap.
MEGATRON_2021 = dataclasses.replace(
    MEGATRON,
    name='megatron 2021',
    hidden_by=lambda *_: NOTHING,
    uses_flash=lambda *_: False,
    gradient_bytes=2,
    accumulated_bytes=12,
)
# As in Korthikanti et al. (2022): communication of an input's gradient overlaps the matmul of the
# weight's gradient (section 6.2). This matmul accumulates into the gradient buffer.
MEGATRON_2022 = dataclasses.replace(
    MEGATRON_2021, name='megatron 2022', hidden_by=_hidden_by_weight_gradients, accumulated_bytes=8
)
# As in NeMo in 2024, on Hopper GPUs.
MEGATRON_2024 = dataclasses.replace(MEGATRON, name='megatron 2024', slowdown=1.14)
# As SimuMax ran Megatron-Core in 2026, on B200s.
MEGATRON_WITHOUT_OVERLAP = dataclasses.replace(
    MEGATRON,
    name='megatron without overlap',
    hidden_by=lambda *_: NOTHING,
    slowdown=1.21,
)
# Megatron-Core's FSDP instead of its distributed optimizer.
MEGATRON_FSDP = dataclasses.replace(FSDP, name='megatron', attention='flash', recomputes_last=True)
# PyTorch in 2023, on Hopper GPUs.
FSDP_2023 = dataclasses.replace(FSDP, name='fsdp 2023', slowdown=1.18, half_size=142)
# MaxText and Pax in 2024.
FSDP_IN_JAX_2024 = dataclasses.replace(FSDP_IN_JAX, name='maxtext 2024', slowdown=1.27)
# With asynchronous tensor parallelism, which overlaps in the same way as Megatron's.
TORCHTITAN_ASYNC = dataclasses.replace(TORCHTITAN, hidden_by=MEGATRON.hidden_by)
