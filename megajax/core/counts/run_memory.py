"""Count the bytes on a device that a run has between its steps. Imports no jax."""

from megajax.core.config import Config
from megajax.core.config.lora import without_adapters
from megajax.core.config.one_dimensional import one_dimensional
from megajax.core.counts.parameters import (
    BYTES,
    dtype_at_rest,
    num_at_rest,
    num_moments,
    own_counts,
    parameters,
)
from megajax.core.parallel.layout import Layout


def stored_bytes(config: Config) -> int:
    """Return the bytes of parameters and moments on each device between steps."""
    layout, of_moment = Layout.of(config), BYTES[config.optim.moments_dtype]
    return sum(
        num_at_rest(x, config.model, layout)
        * (BYTES[dtype_at_rest(x, config)] + of_moment * num_moments(x, config))
        for _, x in parameters(config.model)
    )


def sample_bytes(config: Config) -> int:
    """Return the least bytes that a device needs for samples, in addition to the run's state.

    Generation needs whole matrices, so ZeRO and pipeline parallelism do not shard them. With
    pipeline, context or 2-D tensor parallelism, the weights are first moved to a mesh without it,
    so the matrices are there twice while the layers are separated.
    """
    counts = own_counts(without_adapters(one_dimensional(config)))
    matrices = BYTES[config.train.compute_dtype] * counts.matrices
    if config.mesh.is_one_dimensional:
        return matrices
    return 2 * matrices + 4 * (counts.all - counts.matrices)


def sample_error(config: Config, have: int) -> str:
    """Return why `train.sample_prompts` cannot be continued in this memory; empty if they can."""
    if not config.train.sample_prompts:
        return ''
    stored, needed = stored_bytes(config), sample_bytes(config)
    if stored + needed <= have:
        return ''
    return (
        f'a GPU has {have / 1e9:.1f} GB, and to continue prompts it needs at least '
        f'{needed / 1e9:.1f} GB for matrices that only mesh.model and mesh.experts shard, in '
        f'addition to {stored / 1e9:.1f} GB for parameters and moments; use '
        'train.sample_prompts=[], and megajax generate for a checkpoint'
    )
