"""Count the memory of a pipeline stage at the moments of a step that may need the most.

Like the moments in `memory.py`, these were read from the buffers of programs that XLA compiled for
H100s. In each tick a stage runs one chunk of its layers forward and one backward
(`core/train/pipeline.py`).
"""

from megajax.analysis.plan.live_memory import Held
from megajax.analysis.plan.period_memory import loops_over_periods, of_period
from megajax.analysis.plan.sizes import FLOAT32, Sizes
from megajax.core.config import Config


def moments_of_stage(sizes: Sizes, *, early: bool) -> dict[str, Held]:
    """Return the memory of a stage at the moments that may need the most.

    - head: while the stage computes its part of the head, whose gradient is one more array of the
    table's size.
    - backward: in the backward pass of a chunk, with the gradients of all of its layers and its
      saved activations, which are read from memory or recomputed.

    Both include the accumulated gradients and the chunks in flight. With two chunks in total, the
    last phase is one tick, which XLA takes out of its loop. The gradients of that tick, and half of
    what it recomputes, then have memory of their own from the start, if that fits (`early`) and no
    context-parallel ring has its barriers there. If the loss has several chunks, the head's copies
    in both layouts stay in memory after the loss.
    """
    mesh, recompute = sizes.config.mesh, sizes.config.train.recompute
    tables = sizes.learned_tables * sizes.table
    of_chunk = FLOAT32 * (sizes.learned - tables) // mesh.virtual_stages
    live = sizes.kept_by_chunk
    # The gradients of a recomputed loop over periods are also stacked in the order of the layers.
    twice = of_chunk if recompute == 'full' and loops_over_periods(sizes) else 0
    again = 0
    is_ring = mesh.context > 1 and mesh.context_exchange == 'ring'
    if early and mesh.stages * mesh.virtual_stages == 2 and not is_ring:
        again = of_chunk + (live // 2 if recompute == 'full' else 0)
    sums, table = FLOAT32 * sizes.learned, FLOAT32 * sizes.table if sizes.learned_tables else 0
    slots = kept_in_slots(sizes)
    chunks, logits, dlogits = sizes.logits
    added, transposed = (table, table) if chunks > 1 else (0, 0)
    cast = sizes.itemsize * sizes.table
    held = sizes.gathered + _weights_of_chunk(sizes)
    return {
        'head': Held(
            gathered_weights=held,
            gradients=sums + table,
            activations=slots,
            logits=max(logits, added) + dlogits,
            workspace=transposed + cast + 2 * sizes.residual,
        ),
        'backward': Held(
            gathered_weights=held,
            gradients=sums + of_chunk + twice,
            activations=slots + live,
            workspace=max(kind.in_backward for kind in sizes.kinds)
            + of_period(sizes)
            + _copied(sizes)
            + again
            + sizes.of_adapters
            + (transposed + cast if chunks > 1 else 0),
        ),
    }


def kept_in_slots(sizes: Sizes) -> int:
    """Return the bytes of the chunks in flight, of waiting gradients, and of a tick's inputs."""
    is_full = sizes.config.train.recompute == 'full'
    each = sizes.residual if is_full else sizes.kept_by_chunk
    turns = sizes.config.train.microbatches if sizes.config.train.schedule == 'gpipe' else 1
    return num_slots(sizes.config) * each + (turns + 2) * sizes.residual


def num_slots(config: Config) -> int:
    """Return the chunks in flight on a stage, as in `core/counts/schedule.py`."""
    stages, chunks = config.mesh.stages, config.mesh.virtual_stages
    most = chunks * config.train.microbatches
    return most if config.train.schedule == 'gpipe' else min((chunks + 1) * stages - 1, most)


def _copied(sizes: Sizes) -> int:
    """Return the bytes of a chunk whose layout changes when saved activations are read."""
    if sizes.config.train.recompute == 'full':
        return 0
    if sizes.is_scattered and sizes.config.microbatch_rows == 1:
        return max(sizes.copied, sizes.chunk_layers * sizes.whole)
    return max(sizes.copied, sizes.chunk_layers * 2 * (sizes.whole + sizes.residual))


def _weights_of_chunk(sizes: Sizes) -> int:
    """Return the bytes of the weights of the chunk that a tick runs, if a stage has several.

    With full recomputation, the weights of the forward chunk are not all freed before those of the
    backward chunk are read.
    """
    chunks, train = sizes.config.mesh.virtual_stages, sizes.config.train
    if chunks == 1:
        return 0
    in_fp32 = sizes.config.optim.shard == 'none' and sizes.config.lora is None
    size = FLOAT32 if in_fp32 else sizes.itemsize
    of_chunk = size * (sizes.parameters - sizes.tables) // chunks
    return of_chunk + (of_chunk * 2 // 5 if train.recompute == 'full' else 0)
