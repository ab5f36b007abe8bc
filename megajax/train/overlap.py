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


def num_parts(config: Config) -> int:
    """The number of parts into which the rows of a microbatch are split."""
    return 2 if config.train.overlap == 'batch_split' else 1
