"""Reject `train.sample_prompts` that need more memory than a GPU has, before a run begins."""

from jax.sharding import Mesh

from megajax.core.config import Config, mistake
from megajax.core.counts.run_memory import sample_error


def check_sample_memory(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if a GPU of this process cannot continue `train.sample_prompts`."""
    have = (mesh.local_devices[0].memory_stats() or {}).get('bytes_limit')
    if have and (error := sample_error(config, have)):
        raise mistake('train.sample_prompts', error, 'mesh.model')
