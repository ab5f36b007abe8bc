"""Predict the seconds of matmuls, of rounding to FP8 and of memory-bound operations on a GPU."""

import dataclasses

from megajax.analysis.plan.memory_traffic import Traffic
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Attention, Software
from megajax.core.config import Config
from megajax.core.counts.parameters import BYTES
from megajax.core.counts.product import DENSE, Product
from megajax.core.hardware.records import check_dtype

# The shares of the peak in the GPUs' records count seven matmuls in the backward pass of flash
# attention. Two of them are a second forward kernel, which is not needed if the log-sum-exp is
# saved.
FITTED_BACKWARD = 7 / 5
BLACKWELL = 10, 0
# Bytes that are moved for each element that is rounded, without a transposed copy. With current
# scaling, the tensor is read once more to find its largest value. With blocks (MXFP8), the scales
# are along one dim, so that the operand is also rounded along the other dim.
ROUNDED = {'current': 2 + 2 + 1, 'delayed': 2 + 1, 'blocks': 2 + 1 + 1}
# The matmuls whose first operand is gathered over the tensor-parallel group with sequence
# parallelism: the inputs of two layers, and the gradients of the outputs of two.
GATHERED = 'qkv', 'up', 'out input', 'down input'


def peak_flops(config: Config, cluster: Cluster) -> float:
    """Return the GPU's peak FLOP/s in the config's dtype.

    Raises ConfigError if the GPU does not compute in it.
    """
    check_dtype(config.train.dtype, cluster.hardware)
    return cluster.hardware.peak_flops[config.train.dtype]


def in_parts(product: Product, count: int) -> Product:
    """Return a layer's matmul as it is computed in `count` parts, each with a share of the tokens.

    Attention is either one kernel for all tokens, or one kernel for each part of the sequences.
    """
    if product.where == 'head' or product.name == 'attention':
        return product
    m, n, k = product.sizes
    sizes = (m, n, k // count) if product.name.endswith(' weight') else (m // count, n, k)
    return dataclasses.replace(product, sizes=sizes, times=product.times * count)


def product_seconds(
    product: Product, config: Config, cluster: Cluster, attention: Attention = 'flash'
) -> float:
    """Return the seconds of all runs of a matmul in a step.

    A matmul is compute-bound or memory-bound; flash attention skips the masked half of the FLOPs. A
    window is assumed to be as efficient as a sequence in which a query reads as many keys.
    """
    hardware = cluster.hardware
    peak = hardware.peak_flops[config.train.dtype]
    if config.train.dtype == 'fp8':
        of_others = hardware.peak_flops[config.train.compute_dtype]
        peak = peak * hardware.efficiency.fp8 if product.has_fp8_operands else of_others
    if product.flash:
        done = product.flops / 2 if product.is_causal else product.flops
        efficiency = hardware.efficiency
        share = efficiency.of_attention(attention, product.sizes[1]) or efficiency.matmul
        backward = FITTED_BACKWARD if product.phase == 'backward' else 1
        return product.times * backward * done / (peak * share)
    compute = product.flops / (peak * hardware.efficiency.of_product(*product.sizes))
    moved = product.elements * BYTES[config.train.dtype]
    return product.times * max(
        compute, moved / (hardware.memory_bandwidth * hardware.efficiency.memory)
    )


def rounding_seconds(
    product: Product, config: Config, cluster: Cluster, program: Software
) -> float:
    """Return the seconds in a step for rounding a matmul's operands to FP8, over all its runs.

    A matmul rounds its input, and the matmul for the gradient of its input rounds the gradient of
    its output. The matmul for the weight's gradient uses both of these. Weights are rounded once
    per step, which is not counted.
    """
    is_rounded = config.train.dtype == 'fp8' and product.has_fp8_operands
    if not is_rounded or product.name.endswith(' weight'):
        return 0.0
    rows, _, inner = product.sizes
    is_gathered = config.mesh.sequence_parallel and product.name.removeprefix(DENSE) in GATHERED
    is_shard = program.rounds_shards and is_gathered
    shards = config.mesh.model if is_shard else 1
    moved = ROUNDED[program.rounding or config.train.fp8_scaling] / shards
    if _needs_transpose(config, cluster, program):
        moved += 1 if program.fuses_transpose and not is_shard else 2
    hardware = cluster.hardware
    rate = hardware.memory_bandwidth * hardware.efficiency.memory
    return product.times * product.batch * rows * inner * moved / rate


def _needs_transpose(config: Config, cluster: Cluster, program: Software) -> bool:
    """Return whether the matmul of a weight gradient needs transposed copies of its operands.

    Blackwell can multiply operands in any layout.
    """
    capability = cluster.hardware.compute_capability
    is_old = capability is not None and capability < BLACKWELL
    return is_old and program.rounding != 'blocks' and config.lora is None


def traffic_seconds(operation: Traffic, cluster: Cluster) -> float:
    """Return the seconds of all runs of a memory-bound operation in a step."""
    return (
        operation.times
        * operation.bytes
        / (cluster.hardware.memory_bandwidth * cluster.hardware.efficiency.memory)
    )
