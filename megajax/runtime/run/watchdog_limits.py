"""The watchdog of a run and its limits: the maximum seconds of each phase."""

import sys
from collections.abc import Mapping
from pathlib import Path

from jax._src.distributed import global_state

from megajax.core.config import Config
from megajax.core.counts.parameters import num_parameters
from megajax.runtime.run.watchdog import Watchdog

# Times were measured on two cores, idle unless stated otherwise. A limit is at least twenty times
# the measured time, because machines are shared and file systems may be slow. Except for the
# checkpoint of a large model, it is at most half an hour while a cluster is held, because a hang
# wastes as much time as the limit. Compiling: XLA's GPU compiler takes 30 to 52 s for the 8.3B
# model's step. All layers share one program, so larger models take no longer.
COMPILE = 1800.0
# A first step waits for the last process to compile, and connects the devices (0.1 to 3 s over
# gloo).
FIRST_STEP = 1800.0
# A step: no published Megatron-LM run has steps of more than about a minute. On a CPU a step may
# take longer: see `MEASURED`.
STEP = 600.0
# A step may take this many times the longest step so far, if that exceeds STEP. The first step
# counts less: it takes longer than the others, because it waits for the last process to compile.
MEASURED, MEASURED_FIRST = 10.0, 2.0
# Opening the devices and the run's folder takes 1 to 3 s.
START = 900.0
# The corpus: the processes read all ids once, each its share, at up to 1 GB/s; a cluster's file
# system may be far slower.
CORPUS = 3600.0
# A checkpoint is restored, verified and saved at 0.5 to 1.5 GB/s. The limit is a quarter of an
# hour, plus the time of a process for its share: 50 MB/s to read or write it, 250 MB/s to hash it.
CHECKPOINT, CHECKPOINT_BYTES_PER_SECOND, HASHED_BYTES_PER_SECOND = 900.0, 50e6, 250e6
STATE_BYTES = 12  # bytes for each parameter: fp32 weights and two moments


def phase_limits(config: Config, processes: int) -> Mapping[str, float] | None:
    """Return the limits in seconds, by kind of phase; None without a watchdog.

    A number in `run.watchdog_seconds` is the limit of a step; every lower limit is raised to this
    number.
    """
    chosen = config.run.watchdog_seconds
    if chosen is None:
        return None
    size = STATE_BYTES * num_parameters(config.model)
    share = size / processes
    # Processes with several devices do not share the reads of replicas (`shared_reads.py`).
    to_read = share if processes >= config.mesh.num_devices else size
    checkpoint = (
        CHECKPOINT + to_read / CHECKPOINT_BYTES_PER_SECOND + share / HASHED_BYTES_PER_SECOND
    )
    limits = {
        'start': START,
        'corpus': CORPUS,
        'checkpoint': checkpoint,
        'compile': COMPILE,
        'first step': FIRST_STEP,
        'step': STEP,
    }
    if chosen == 'auto':
        return limits
    return {kind: max(limit, chosen) for kind, limit in limits.items()} | {'step': chosen}


def step_limit(seconds: float, *, is_first: bool) -> float:
    """Return the limit of later steps after a step, or the first step, that took `seconds`."""
    return (MEASURED_FIRST if is_first else MEASURED) * seconds


def make_watchdog(config: Config, folder: Path | None) -> Watchdog:
    """Return the watchdog of this process; it logs to `folder` if that is known already.

    By default there is no watchdog if the kernel is not Linux.
    """
    # `jax.process_index` would start the devices.
    index, count = global_state.process_id, global_state.num_processes
    is_on = config.run.watchdog_seconds != 'auto' or sys.platform == 'linux'
    limits = phase_limits(config, count) if is_on else None
    return Watchdog(folder, limits, index=index, count=count)
