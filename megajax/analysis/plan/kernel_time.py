"""Predict the seconds of matmuls and of memory-bound operations on a GPU."""

import dataclasses

from megajax.analysis.plan.memory_traffic import Traffic
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Attention
from megajax.analysis.plan.sizes import BYTES
from megajax.core.config import Config
from megajax.core.counts.product import Product
from megajax.core.hardware.records import check_dtype

# The shares of the peak in the GPUs' records count seven matmuls in the backward pass of flash
# attention. Two of them are a second forward kernel, which is not needed if the log-sum-exp is
# saved.
FITTED_BACKWARD = 7 / 5


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


def traffic_seconds(operation: Traffic, cluster: Cluster) -> float:
    """Return the seconds of all runs of a memory-bound operation in a step."""
    return (
        operation.times
        * operation.bytes
        / (cluster.hardware.memory_bandwidth * cluster.hardware.efficiency.memory)
    )
