"""Overlap of communication and computation: `train.overlap`, and the options that it needs.

In a Megatron layer every matmul waits for the collective before it. Two halves of a microbatch do
not depend on each other, or only in attention: while one communicates, the other computes (Domino,
Wang et al., 2024). Communication over `data` overlaps the matmuls of other layers. The number of
bytes does not change. `core/model/overlap/` implements the schedule. With pipeline stages, context
parallelism, 2-D tensor parallelism, images, experts, LoRA in FP8 or current scaling, which the
schedule does not support, XLA's scheduler orders the work of the halves.
"""

from megajax.core.config import Config

MEBIBYTE = 2**20
# XLA's GPU compiler would merge the matmuls and the collectives of the two halves again. With these
# options it only merges collectives that are smaller than an activation. jax 0.10.2 and 0.12 know
# these options.
OPTIONS = {
    'xla_gpu_dot_merger_threshold_mb': '0',
    'xla_gpu_all_reduce_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_all_gather_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_reduce_scatter_combine_threshold_bytes': str(MEBIBYTE),
}
# By default only one collective of a program is in flight at a time. Tensor parallelism's
# collectives would then block the transfers of weights and gradients in ZeRO-2 and ZeRO-3, of
# activations between pipeline stages, and of keys and values between neighboring context shards.
SLOTS = {'xla_gpu_experimental_parallel_collective_overlap_limit': '4'}
# By default XLA starts a collective as late as it can, next to the last matmul before its result is
# needed. In the overlap schedule it starts where the schedule puts it.
EARLY = {'xla_gpu_experimental_collective_start_as_early_as_possible': True}


def overlap_options(config: Config) -> dict[str, str | bool]:
    """Return the options for XLA's GPU compiler that the config's overlap needs."""
    mesh, overlap = config.mesh, config.overlap
    sends_in_layers = overlap.shard in ('gradients', 'weights') and mesh.data > 1
    rings = mesh.context > 1 and (mesh.context_exchange == 'ring' or config.model.has_windows)
    is_halved = overlap.is_split and sends_in_layers
    needs_slots = mesh.stages > 1 or rings or overlap.in_order or is_halved
    return (
        (OPTIONS if overlap.is_split else {})
        | (SLOTS if needs_slots else {})
        | (EARLY if overlap.in_order else {})
    )
