"""Overlap of communication and computation by splitting the batch: `train.overlap=batch_split`.

In a Megatron layer every matrix product waits for the collective before it. Two halves of a
microbatch do not depend on each other: while one communicates, the other computes (Domino, Wang et
al., 2024). The number of bytes is the same.
"""

from megajax.config import Config

MEBIBYTE = 2**20
# XLA's GPU compiler would merge the products and the collectives of the two halves again. It may
# merge collectives that are smaller than an activation. jax 0.10.2 and 0.12 know these options.
OPTIONS = {
    'xla_gpu_dot_merger_threshold_mb': '0',
    'xla_gpu_all_reduce_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_all_gather_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_reduce_scatter_combine_threshold_bytes': str(MEBIBYTE),
}
# By default all collectives of a program share one slot of the schedule, so those of tensor
# parallelism would take that of the weights and gradients of ZeRO-2 and ZeRO-3, of what a stage
# sends to the next, and of the keys and values that go round a ring.
SLOTS = {'xla_gpu_experimental_parallel_collective_overlap_limit': '4'}


def num_parts(config: Config) -> int:
    """The number of parts into which the rows of a microbatch are split."""
    return 2 if config.train.overlap == 'batch_split' else 1


def overlap_options(config: Config) -> dict[str, str]:
    """Return the options for XLA's GPU compiler that the config's overlap needs."""
    mesh, is_split = config.mesh, config.train.overlap == 'batch_split'
    sends_in_layers = config.optim.shard in ('gradients', 'weights') and mesh.data > 1
    rings = mesh.context > 1 and mesh.context_exchange == 'ring'
    needs_slots = mesh.stages > 1 or rings or (is_split and sends_in_layers)
    return (OPTIONS if is_split else {}) | (SLOTS if needs_slots else {})
