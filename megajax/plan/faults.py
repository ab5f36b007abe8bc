"""What checkpoints and failures take of a run, by Young (1974) and Daly (2006)."""

import dataclasses
from math import sqrt

from megajax.config import Config
from megajax.counts.parameters import num_parameters
from megajax.plan.network import Cluster
from megajax.plan.time import StepTime

STATE = 12  # bytes of a parameter in a checkpoint: it and AdamW's two moments, in fp32
HOST_LINK = 20e9  # bytes that a GPU copies to its host in a second: PCIe 4, of 32 GB/s
STORAGE = 1e9  # bytes that a host writes in a second, unless it is said
# Dubey et al. (2024), The Llama 3 Herd of Models, table 5: 419 interruptions in 54 days on 16,384 H100s.
GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / 419
RESTART = 300.0  # seconds until a run that failed takes its next step, unless it is said


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faults:
    """What checkpoints and failures take of a run; all times in seconds."""

    checkpoint_bytes: int
    hold_up: float  # of the steps by a save, while each GPU copies its part to its host
    write: float  # until a checkpoint is on disk; steps go on meanwhile
    between_failures: float  # of any GPU
    restart: float  # until the step after the checkpoint
    interval: float  # between two checkpoints, as the config has it

    @property
    def best_interval(self) -> float:
        """Of the highest goodput: sqrt(2 hold_up between_failures) by Young (1974), but not before the last save is done."""
        return max(self.write, sqrt(2 * self.hold_up * self.between_failures))

    def goodput(self, interval: float) -> float:
        """The share of the time in which steps are taken that stay, with a checkpoint every so many seconds.

        To first order, as Daly (2006): a failure costs the restart, half an interval, and the time of a
        write, before whose end the checkpoint before is the newest.
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
    """Of a run of `config`, with storage that takes so many bytes in a second from all hosts together."""
    size = STATE * num_parameters(config.model, padded=True)
    own = size / config.mesh.model / (config.mesh.data if config.optim.shard else 1)
    return Faults(
        checkpoint_bytes=size,
        hold_up=own / HOST_LINK,
        write=size / (storage or STORAGE * cluster.num_hosts),
        between_failures=3600 * gpu_hours_to_failure / cluster.num_devices,
        restart=restart,
        interval=config.checkpoint.every * time.total,
    )
