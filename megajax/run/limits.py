"""How many seconds each phase of a run may take before the watchdog ends it."""

from collections.abc import Mapping

from megajax.config import Config
from megajax.counts.parameters import num_parameters

# Measured on two cores, idle unless said otherwise; a limit is at least twenty times that, because machines are shared and file
# systems slow, and since a hang costs what the limit is, no more than half an hour where a cluster is held.
# `compile`: the 8.3B model's step takes XLA's GPU compiler 30 to 52 s, and every layer has the same program, so larger ones no more.
COMPILE = 1800.0
# A first step waits for the process that compiles last, and connects the devices (0.1 to 3 s over gloo).
FIRST_STEP = 1800.0
# A step: no published run of Megatron-LM's has one of more than a minute or so. On a CPU it may be longer: see `MEASURED`.
STEP = 600.0
MEASURED = 10.0  # times the longest step so far, if that is more
# The devices and the run's folder: 1 to 3 s.
START = 900.0
# The corpus: its ids are read once, at up to a gigabyte per second; there is no telling how slow a cluster's file system is.
CORPUS = 3600.0
# A checkpoint is restored, verified and saved at 0.5 to 1.5 GB/s; it is granted the time of a disk of 50 MB/s, and a quarter of an hour.
CHECKPOINT, CHECKPOINT_BYTES_PER_SECOND = 900.0, 50e6
STATE_BYTES = 12  # for each parameter: fp32 weights and two moments


def phase_limits(config: Config, processes: int) -> Mapping[str, float] | None:
    """Seconds by kind of phase; None if there is no watchdog.

    A number in `run.watchdog_seconds` is the limit of a step, and of every phase whose own is less.
    """
    chosen = config.run.watchdog_seconds
    if chosen is None:
        return None
    checkpoint = (
        CHECKPOINT
        + STATE_BYTES * num_parameters(config.model) / processes / CHECKPOINT_BYTES_PER_SECOND
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
