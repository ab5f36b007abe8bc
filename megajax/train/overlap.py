"""Communication beside computation: `train.overlap=batch_split`.

In a layer of Megatron's every product waits for the collective before it. Two halves of a microbatch do not wait for each other: while
one is on the wire the other computes (Domino, Wang et al., 2024). The bytes are the same.
"""

from megajax.config import Config

MEBIBYTE = 2**20
# XLA's GPU compiler would join the halves' products and collectives again; what is smaller than an activation it may join. Known to
# jax 0.10.2 and 0.12.
OPTIONS = {
    'xla_gpu_dot_merger_threshold_mb': '0',
    'xla_gpu_all_reduce_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_all_gather_combine_threshold_bytes': str(MEBIBYTE),
    'xla_gpu_reduce_scatter_combine_threshold_bytes': str(MEBIBYTE),
}


def num_parts(config: Config) -> int:
    """Into how many parts the rows of a microbatch are cut."""
    return 2 if config.train.overlap == 'batch_split' else 1
