"""Measure the speed and memory of a step, and the time that a process spends between steps."""

import statistics
from collections.abc import Sequence

import jax
from jax.stages import Compiled

from megajax.core.config import Config
from megajax.core.counts.flops import step_flops
from megajax.core.hardware.records import hardware_of
from megajax.runtime.processes.consensus import gather
from megajax.runtime.run.clock import Clock


class Meter:
    """A meter for the steps of `config` on `devices` of all processes; `compiled` is the step."""

    def __init__(self, config: Config, compiled: Compiled, devices: Sequence[jax.Device]):
        self._devices = [
            device for device in devices if device.process_index == jax.process_index()
        ]
        self._tokens = config.train.batch_size * config.train.seq_len
        self._flops = step_flops(config).model / len(devices)
        known = hardware_of(devices[0].device_kind)
        self._peak = known.peak_flops.get(config.train.dtype) if known else None
        self._planned_bytes = _planned_bytes(compiled)
        # bytes in use on the fullest device of all processes, which `BetweenSteps` finds
        self.fullest_bytes = 0.0

    def measure(self, seconds: float) -> dict[str, float]:
        """Return the rates of a step that took `seconds`, and its memory.

        Tokens/s are summed over all devices; TFLOP/s, MFU and memory are per device. FLOPs are
        model FLOPs, without recomputation (Chowdhery et al., 2022); `mfu` is left out if the
        device's peak is not known. `memory_bytes` is the largest number of bytes that the allocator
        of any device has had in use since the start; other processes' devices count as of the last
        `BetweenSteps.compare_processes`. Without such a count, as on a CPU, `planned_memory_bytes`
        is the memory that XLA planned for the step.
        """
        rates = {
            'tokens_per_s': self._tokens / seconds,
            'tflops_per_device': self._flops / seconds / 1e12,
        }
        if self._peak:
            rates['mfu'] = self._flops / seconds / self._peak
        return rates | self._memory()

    def peak_bytes(self) -> float:
        """Return the `memory_bytes` of a step; 0 if the devices do not count them."""
        stats = [device.memory_stats() or {} for device in self._devices]
        return max(self.fullest_bytes, *(each.get('peak_bytes_in_use') or 0 for each in stats))

    def _memory(self) -> dict[str, float]:
        if peak := self.peak_bytes():
            return {'memory_bytes': peak}
        return {'planned_memory_bytes': self._planned_bytes} if self._planned_bytes else {}


def _planned_bytes(compiled: Compiled) -> int:
    """Return the bytes per device of inputs, temporaries and new outputs; 0 if unknown."""
    plan = compiled.memory_analysis()
    if plan is None:
        return 0
    return (
        plan.argument_size_in_bytes
        + plan.temp_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
    )


class BetweenSteps:
    """The seconds between the steps of a run since the last report, by the run's clock."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._own_seconds = self._checkpoint_seconds = 0.0  # clock readings at the last report
        self._steps = 0  # number of steps since the last report

    def begin(self) -> None:
        """Count this process's own seconds from now on; called before the first step."""
        self._own_seconds = self._clock.seconds('data_wait', 'other')

    def checkpoint_ms(self) -> float:
        """Count a step; return the ms for which saving has blocked the run since the previous call.

        Called once after each step.
        """
        self._steps += 1
        before = self._checkpoint_seconds
        self._checkpoint_seconds = self._clock.seconds('checkpoint')
        return 1e3 * (self._checkpoint_seconds - before)

    def compare_processes(self, meter: Meter) -> dict[str, float]:
        """Return the process that is last to reach a step; all processes must call this.

        The result is the process that was last on average over the steps since the previous call,
        which are fewer than `train.log_every` after a resume. Also return the `memory_bytes` of the
        fullest device of all processes, if they are counted, and let `meter` know them.
        """
        own = self._clock.seconds('data_wait', 'other') - self._own_seconds
        # Other processes answer only after the step in flight: this wait counts as productive.
        self._clock.begin('productive')
        values = slowest_and_fullest(own / self._steps, meter.peak_bytes())
        meter.fullest_bytes = values.get('memory_bytes', 0.0)
        self._steps = 0
        self._clock.begin('other')
        self._own_seconds = self._clock.seconds('data_wait', 'other')
        return values


def slowest_and_fullest(own_seconds: float, memory_bytes: float) -> dict[str, float]:
    """Return the process with the most seconds of its own, and its lead over the median in ms.

    All processes must call this. In a step, all processes wait for each other, so they differ only
    in the time outside of steps: waiting for data, and Python between steps. A GPU that is slower
    than the others is not detected here. The result also has the largest `memory_bytes` of all
    processes, unless they are 0. It is empty if there is one process.
    """
    if jax.process_count() == 1:
        return {}
    all_seconds, all_bytes = zip(*gather(own_seconds, memory_bytes), strict=True)
    most = max(all_seconds)
    return {
        'slowest_process': all_seconds.index(most),
        'slowest_process_behind_ms': 1e3 * (most - statistics.median_low(all_seconds)),
        **({'memory_bytes': max(all_bytes)} if memory_bytes else {}),
    }
