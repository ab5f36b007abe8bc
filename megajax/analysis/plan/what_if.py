"""Predict what 8-bit moments, 16-bit moments, and activations in host memory would save.

megajax can train with 16-bit moments only. The others tell you whether different software, such as
bitsandbytes or torchao, would need fewer GPUs.
"""

from collections.abc import Iterator

from megajax.analysis.plan.kernel_time import traffic_seconds
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.memory import largest_microbatch
from megajax.analysis.plan.memory_traffic import Traffic
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Software
from megajax.analysis.plan.result import WhatIf
from megajax.analysis.plan.search import fewest_gpus, memory_on, usable_memory
from megajax.analysis.plan.sizes import NO_SAVINGS, Savings, Sizes
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.config import Config

ON_HOST = Savings(activations_on_host=True)
IN_8_BITS = Savings(moments_in_8_bits=True)


def what_if(config: Config, cluster: Cluster, program: Software, time: StepTime) -> list[WhatIf]:
    """Return a layout as planned, and with each saving of memory; `time` is the planned step's."""
    found = [_variant('as planned', config, cluster, program, time.total)]
    if config.optim.moments_dtype != 'bfloat16':
        rounded = changed(config, optim__moments_dtype='bfloat16')
        seconds = step_time(rounded, cluster, program).total
        name = 'optim.moments_dtype=bfloat16'
        found.append(_variant(name, rounded, cluster, program, seconds))
    return [*found, *_of_other_software(config, cluster, program, time)]


def _of_other_software(
    config: Config, cluster: Cluster, program: Software, time: StepTime
) -> Iterator[WhatIf]:
    if config.optim.kind == 'adamw':
        seconds = time.total - _saved_by_8_bits(config, cluster)
        yield _variant('8-bit moments', config, cluster, program, seconds, IN_8_BITS)
    if config.mesh.stages == 1 and (rate := cluster.hardware.to_host):
        sent = _sent_to_host(config, cluster)
        seconds = time.total + _exposed(config.train.microbatches * sent / rate, config, time)
        name = 'activations in host memory'
        yield _variant(name, config, cluster, program, seconds, ON_HOST).model_copy(
            update={'host_bytes': sent * cluster.devices_per_host}
        )


def _variant(
    name: str,
    config: Config,
    cluster: Cluster,
    program: Software,
    seconds: float,
    savings: Savings = NO_SAVINGS,
) -> WhatIf:
    held, capability = program.evened(config), cluster.hardware.compute_capability
    available = usable_memory(cluster)
    return WhatIf(
        name=name,
        is_supported=savings == NO_SAVINGS,
        bytes=memory_on(held, cluster, savings).total,
        seconds=seconds,
        largest_microbatch=largest_microbatch(held, available, capability, savings),
        fewest_gpus=fewest_gpus(config, cluster, program, savings),
    )


def _saved_by_8_bits(config: Config, cluster: Cluster) -> float:
    """Return the seconds of reading and writing moments that 8 bits save."""
    capability = cluster.hardware.compute_capability
    plain, small = (Sizes(config, capability, savings) for savings in (NO_SAVINGS, IN_8_BITS))
    saved = Traffic(name='moments', bytes=2 * (plain.moments - small.moments), times=1)
    return traffic_seconds(saved, cluster)


def _sent_to_host(config: Config, cluster: Cluster) -> int:
    """Return the bytes that a GPU sends to host memory in the forward pass of a microbatch."""
    capability = cluster.hardware.compute_capability
    return Sizes(config, capability).kept - Sizes(config, capability, ON_HOST).kept


def _exposed(needed: float, config: Config, time: StepTime) -> float:
    """Return what transfers that take `needed` seconds in each direction add to a step.

    They overlap the computation of the forward and of the backward pass, which takes twice as long,
    or three times with full recomputation.
    """
    share = 1 / (4 if config.train.recompute == 'full' else 3)
    computing = time.products + time.memory_bound
    return sum(max(0.0, needed - part * computing) for part in (share, 1 - share))
