"""The traced steps of every device, summed by instruction."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from megajax.analysis.profile.intervals import Idle, divide
from megajax.analysis.profile.trace import Event, Trace
from megajax.analysis.profile.work import ProgramWork
from megajax.xla.hlo.groups import Groups

Group = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one instruction on one device in all traced steps, in order, in seconds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    shares: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One device: the seconds of a mean step and of its idle time, and all runs by instruction."""

    process: int
    device: int
    num_steps: int
    step: float
    idle: Idle
    runs: Mapping[str, Runs]

    def launches(self, name: str) -> float:
        """Return how often an instruction runs in a step."""
        return len(self._of(name).seconds) / self.num_steps

    def seconds(self, name: str) -> float:
        """Return the seconds of an instruction in a step, with each run from beginning to end."""
        return sum(self._of(name).seconds) / self.num_steps

    def share(self, name: str) -> float:
        """Return an instruction's share of a step, in seconds; see `intervals.py`."""
        return sum(self._of(name).shares) / self.num_steps

    def _of(self, name: str) -> Runs:
        return self.runs.get(name) or Runs()


def measure(
    traces: Sequence[Trace], steps: Sequence[int], module: str, work: ProgramWork
) -> list[Measured]:
    """Divide the steps of every device among its events; `module` is the program's name."""
    return [
        _of_device(process, device, trace, _own_work(trace, events, module, work), steps, work)
        for process, trace in enumerate(traces)
        for device, events in trace.devices.items()
    ]


def _own_work(trace: Trace, events: Sequence[Event], module: str, work: ProgramWork) -> list[Event]:
    """Return kernels and transfers; names of other programs' events begin with the program's.

    On a CPU, a loop and most calls are also events, which last as long as the events inside them.
    """
    named = [
        event
        if event.module == module
        else event._replace(name=f'{event.module or "no program"}/{event.name}')
        for event in events
    ]
    if trace.gpu is not None:
        return work.schedule.named(named)
    seen = {event.name for event in named}
    around = {name for name, inside in work.calls.items() if inside & seen}
    return [event for event in named if event.name not in around]


def _of_device(
    process: int,
    device: int,
    trace: Trace,
    events: Sequence[Event],
    steps: Sequence[int],
    work: ProgramWork,
) -> Measured:
    divided = [
        divide(events, trace.steps[step], lambda name: work.of(name).is_transfer) for step in steps
    ]
    runs = defaultdict[str, Runs](Runs)
    for step in divided:
        for timed in step.events:
            runs[timed.name].seconds.append(timed.seconds)
            runs[timed.name].shares.append(timed.share)
    return Measured(
        process=process,
        device=device,
        num_steps=len(steps),
        step=fmean(step.seconds for step in divided),
        idle=Idle(*(fmean(parts) for parts in zip(*(step.idle for step in divided), strict=True))),
        runs=dict(runs),
    )


def in_mesh_order(devices: Sequence[Measured], traces: Sequence[Trace]) -> list[Measured]:
    """Return the devices as `make_mesh` orders them: the processes of a host are adjacent."""
    hosts = [trace.host for trace in traces]
    return sorted(devices, key=lambda device: hosts.index(hosts[device.process]))


def fastest(devices: Sequence[Measured], groups: Groups, name: str) -> dict[Group, float]:
    """Return an instruction's seconds in a step on the fastest device of each group.

    A group consists of indices into `devices`, which are in the order of the mesh. The fastest
    device of a run arrived last, and waited for no other of its group. Groups in which no device
    ran the instruction are left out.
    """
    ran = {
        group: [devices[place] for place in group if name in devices[place].runs]
        for group in groups
    }
    return {group: _fastest(inside, name) for group, inside in ran.items() if inside}


def _fastest(devices: Sequence[Measured], name: str) -> float:
    """Return an instruction's seconds in a step if each run took as long as on the fastest device.

    If devices differ in the number of runs, they cannot be compared run by run. The result is then
    the seconds of the fastest device.
    """
    of_all = [device.runs[name].seconds for device in devices]
    if len({len(runs) for runs in of_all}) == 1:
        of_all = [[min(run) for run in zip(*of_all, strict=True)]]
    return min(map(sum, of_all)) / devices[0].num_steps
