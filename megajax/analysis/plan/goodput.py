"""Predict the cost of checkpoints and failures, by Young (1974) and Daly (2006)."""

import dataclasses
from math import sqrt

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.sizes import Sizes
from megajax.analysis.plan.time import StepTime
from megajax.core.config import Config
from megajax.core.counts.parameters import (
    BYTES,
    dim_sizes,
    dtype_at_rest,
    elements,
    num_moments,
    parameters,
)

HOST_LINK = 20e9  # bytes per second from a GPU to its host, over PCIe 4 (32 GB/s)
STORAGE = 1e9  # default for the bytes per second that a host writes
# Dubey et al. (2024), The Llama 3 Herd of Models, table 5: 419 interruptions in 54 days on 16,384
# H100s.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / 419
RESTART = 300.0  # default for the seconds until a failed run takes its next step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """The cost of checkpoints and failures for a run; all times are in seconds."""

    checkpoint_bytes: int
    hold_up: float  # time a save blocks training: each GPU copies its part to its host
    write: float  # time until a checkpoint is on disk; training continues meanwhile
    between_failures: float  # time between two failures of any GPU
    restart: float  # time from a failure to the step after the checkpoint
    interval: float  # time between two checkpoints, as the config sets it

    @property
    def best_interval(self) -> float:
        """The interval with the highest goodput.

        It is sqrt(2 hold_up between_failures) by Young (1974), but at least the time of a write, so
        that a save ends before the next one starts.
        """
        return max(self.write, sqrt(2 * self.hold_up * self.between_failures))

    def goodput(self, interval: float) -> float:
        """Return the share of the time spent on steps that are not lost.

        A checkpoint is written every `interval` seconds. To first order, as in Daly (2006), a
        failure costs the restart, half an interval, and the time of a write, because the previous
        checkpoint is the newest until the write has ended.
        """
        lost = self.restart + self.write + interval / 2
        return (
            interval
            / (interval + self.hold_up)
            * self.between_failures
            / (self.between_failures + lost)
        )


def faults(
    config: Config,
    time: StepTime,
    cluster: Cluster,
    *,
    storage: float | None = None,
    gpu_hours_to_failure: float = GPU_HOURS_TO_FAILURE,
    restart: float = RESTART,
) -> Faults:
    """Return the cost of checkpoints and failures for a run of `config`.

    `storage` is the bytes per second that all hosts write in total.
    """
    widths = dim_sizes(config.model)
    moment = BYTES[config.optim.moments_dtype]
    size = sum(
        elements(one.dims, widths)
        * (BYTES[dtype_at_rest(one, config)] + moment * num_moments(one, config))
        for _, one in parameters(config.model)
    )
    of_gpu, checkpoint = Sizes(config), config.checkpoint
    minutes = float('inf') if checkpoint.minutes is None else checkpoint.minutes
    return Faults(
        checkpoint_bytes=size,
        hold_up=(of_gpu.parameters_at_rest + of_gpu.moments) / HOST_LINK,
        write=size / (storage or STORAGE * cluster.num_hosts),
        between_failures=3600 * gpu_hours_to_failure / cluster.num_devices,
        restart=restart,
        interval=min(checkpoint.every * time.total, 60 * minutes),
    )
