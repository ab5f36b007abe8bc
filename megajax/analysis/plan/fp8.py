"""Predict the time in which software rounds the operands of matmuls to FP8."""

from typing import TYPE_CHECKING

from megajax.analysis.plan.network import Cluster
from megajax.core.config import Config
from megajax.core.counts.product import DENSE, Product

if TYPE_CHECKING:
    from megajax.analysis.plan.programs import Software

BLACKWELL = 10, 0
# Bytes that are moved for each element that is rounded, without a transposed copy. With current
# scaling, the tensor is read once more to find its largest value. With blocks (MXFP8), the scales
# are along one dim, so that the operand is also rounded along the other dim.
ROUNDED = {'current': 2 + 2 + 1, 'delayed': 2 + 1, 'blocks': 2 + 1 + 1}
# The matmuls whose first operand is gathered over the tensor-parallel group with sequence
# parallelism: the inputs of two layers, and the gradients of the outputs of two.
GATHERED = 'qkv', 'up', 'out input', 'down input'


def rounding_seconds(
    product: Product, config: Config, cluster: Cluster, program: 'Software'
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


def _needs_transpose(config: Config, cluster: Cluster, program: 'Software') -> bool:
    """Return whether the matmul of a weight gradient needs transposed copies of its operands.

    Blackwell can multiply operands in any layout.
    """
    capability = cluster.hardware.compute_capability
    is_old = capability is not None and capability < BLACKWELL
    return is_old and program.rounding != 'blocks' and config.lora is None
