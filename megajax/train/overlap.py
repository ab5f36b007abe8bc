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
# parallelism would take that of the weights and gradients of ZeRO-2 and ZeRO-3.
SLOTS = {'xla_gpu_experimental_parallel_collective_overlap_limit': '4'}


def num_parts(config: Config) -> int:
    """The number of parts into which the rows of a microbatch are split."""
    return 2 if config.train.overlap == 'batch_split' else 1


def overlap_options(config: Config) -> dict[str, str]:
    """Return the options for XLA's GPU compiler that `train.overlap` needs."""
    if config.train.overlap != 'batch_split':
        return {}
    sends_in_layers = config.optim.shard in ('gradients', 'weights') and config.mesh.data > 1
    return OPTIONS | SLOTS if sends_in_layers else OPTIONS
