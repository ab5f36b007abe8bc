"""Reject prompts to continue during a run that need more memory than a GPU has, before it begins.

Generation needs whole matrices, so ZeRO and pipeline parallelism do not shard them.
"""

from jax.sharding import Mesh

from megajax.core.config import Config, mistake
from megajax.core.config.lora import without_adapters
from megajax.core.counts.parameters import own_counts
from megajax.core.parallel.mesh import one_dimensional
from megajax.runtime.run.host_memory import BYTES, stored_bytes


def check_sample_memory(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if a GPU of this process cannot continue `train.sample_prompts`."""
    have = (mesh.local_devices[0].memory_stats() or {}).get('bytes_limit')
    if not config.train.sample_prompts or not have:
        return
    stored, needed = stored_bytes(config), sample_bytes(config)
    if stored + needed > have:
        message = (
            f'a GPU has {have / 1e9:.1f} GB, and to continue prompts it needs at least '
            f'{needed / 1e9:.1f} GB for matrices that only mesh.model and mesh.experts shard, in '
            f'addition to {stored / 1e9:.1f} GB for parameters and moments; use '
            'train.sample_prompts=[], and megajax generate for a checkpoint'
        )
        raise mistake('train.sample_prompts', message, 'mesh.model')


def sample_bytes(config: Config) -> int:
    """Return the least bytes that a device needs for samples, in addition to the run's state.

    With pipeline, context or 2-D tensor parallelism, the weights are first moved to a mesh without
    it, so the matrices are there twice while the layers are separated.
    """
    counts = own_counts(without_adapters(one_dimensional(config)))
    matrices = BYTES[config.train.compute_dtype] * counts.matrices
    if config.mesh.is_one_dimensional:
        return matrices
    return 2 * matrices + 4 * (counts.all - counts.matrices)
