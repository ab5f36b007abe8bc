"""Count the memory of a Megatron rank by the formulas of its papers.

Activations follow Korthikanti et al. (2022), table 2 and section 4.2.3. Weights, gradients and
optimizer state follow Megatron-Core's mixed precision: 2 + 4 bytes per parameter, and 12 bytes that
the distributed optimizer shards over `data`.
"""

from megajax.core.config import Config
from megajax.core.counts.parameters import megatron_counts
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.counts.stages import FIRST

OF_WEIGHTS_AND_GRADIENTS, OF_OPTIMIZER = 6, 12  # bytes per parameter


def in_flight(config: Config) -> int:
    """Return the chunks of layers in flight on Megatron's first stage.

    Plain 1F1B has as many as there are stages, fewer than a lock-step schedule
    (`core/counts/schedule.py`). The interleaved schedule has one more than its warm-up forward
    passes, as the lock-step schedule does.
    """
    stages, chunks, count = (
        config.mesh.stages,
        config.mesh.virtual_stages,
        config.train.microbatches,
    )
    if chunks == 1:
        return min(stages, count)
    return min((chunks + 1) * stages - 1, chunks * count)


def megatron_memory(config: Config, *, flash: bool) -> int:
    """Return the bytes of the first rank, which needs the most memory."""
    mesh, model = config.mesh, config.model
    count = megatron_counts(model, mesh.model, mesh.stages, ('layers', *FIRST)).all
    sharded = mesh.data_shards if config.optim.shard != 'none' else 1
    of_chunk = layers_of_chunk(config) * kept_by_layer(config, flash=flash)
    return int(
        count * (OF_WEIGHTS_AND_GRADIENTS + OF_OPTIMIZER / sharded) + in_flight(config) * of_chunk
    )


def kept_by_layer(config: Config, *, flash: bool) -> float:
    """Return the bytes that a layer's forward pass saves for its backward pass."""
    mesh, model = config.mesh, config.model
    tokens = config.microbatch_rows * config.train.seq_len // mesh.context
    stream, t = tokens * model.hidden_size, mesh.model
    if config.train.recompute == 'full':
        return 2 * stream / (t if mesh.sequence_parallel else 1)
    kept = stream * (34 / t if mesh.sequence_parallel else 10 + 24 / t)
    if flash or config.train.recompute == 'selective':
        return kept
    return kept + 5 * model.num_heads * config.train.seq_len * tokens / t
