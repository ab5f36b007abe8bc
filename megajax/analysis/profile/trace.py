"""Traces of XLA's profiler (XPlane) as plain records: the events of each device, and the steps.

On GPUs a device is a plane `/device:GPU:N`, and each of its streams a line whose events are
kernels, library calls, copies and NCCL's transfers. On CPUs all devices of a process share its
threads, which are lines of the plane `/host:CPU`. The `device_ordinal` of an event is the device
that it worked for. If an event's work continues in other threads, a second event, `end: NAME`,
follows with the same number (`_p` in the first, `_c` in the second). A thread may write the second
event late. But a step waits for its work, so no event counts as longer than the step in which it
began. An event's `hlo_op` is the name of an instruction of the compiled program; the Python thread
has an event for each traced step.
"""

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from megajax.base.errors import reason
from megajax.core.config import ConfigError
from megajax.runtime.run.profile import STEP

_GPU, _HOST, _STREAM = '/device:GPU:', '/host:CPU', 'Stream #'
_GPU_NAME = 'gpu_device_name'


class Window(NamedTuple):
    """An interval of time, in seconds since the trace began."""

    start: float
    end: float


class Event(NamedTuple):
    """One run of an instruction, or of a copy or kernel outside a program, on one device."""

    name: str
    module: str  # name of the instruction's program; empty outside a program
    start: float  # seconds since the trace began
    end: float
    kernel: str = ''  # name of the GPU kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """The trace of one process: its steps by number, and the events of its devices by number.

    Events outside all steps are left out.
    """

    host: str
    steps: Mapping[int, Window]
    devices: Mapping[int, Sequence[Event]]
    gpu: str | None  # jax's name of the GPUs; None on CPUs


def read_trace(path: Path) -> Trace:
    """Read a trace file; raise ConfigError if it is not one, or if it contains no step."""
    try:
        planes = {plane.name: plane for plane in ProfileData.from_file(str(path)).planes}
    except Exception as error:
        raise ConfigError(
            f'{path} cannot be read as a trace ({reason(error)}): '
            'trace some steps again (train.profile)'
        ) from error
    gpus = {name: plane for name, plane in planes.items() if name.startswith(_GPU)}
    host = planes.get(_HOST)
    steps = _steps(host) if host else {}
    devices = (
        {
            int(name.removeprefix(_GPU)): [*_on_gpu(plane, [*steps.values()])]
            for name, plane in gpus.items()
        }
        if gpus
        else _on_cpu(host, [*steps.values()])
    )
    devices = {number: events for number, events in sorted(devices.items()) if events}
    if not steps or not devices:
        raise ConfigError(
            f'{path} holds no {"complete step" if not steps else "event of a device"}: '
            'trace some steps again (train.profile)'
        )
    names = (dict(plane.stats).get(_GPU_NAME) for plane in gpus.values())
    return Trace(
        host=path.name.removesuffix('.xplane.pb'),
        steps=steps,
        devices=devices,
        gpu=next((str(name) for name in names if name), 'an unknown GPU') if gpus else None,
    )


def _steps(host: Any) -> dict[int, Window]:
    return {
        int(dict(event.stats)['step_num']): _window(event)
        for line in host.lines
        for event in line.events
        if event.name == STEP and 'step_num' in dict(event.stats)
    }


def _on_gpu(plane: Any, steps: Sequence[Window]) -> Iterator[Event]:
    for line in plane.lines:
        if line.name.startswith(_STREAM):  # other lines repeat these events or are counters
            for event in line.events:
                window = _window(event)
                if _is_within(window, steps):
                    stats = dict(event.stats)
                    names = stats.get('hlo_op', event.name), stats.get('hlo_module', ''), event.name
                    # A large trace has millions of events, but few names.
                    name, module, kernel = (sys.intern(str(text)) for text in names)
                    yield Event(name, module, *window, kernel)


def _on_cpu(host: Any, steps: Sequence[Window]) -> dict[int, list[Event]]:
    devices = defaultdict[int, list[Event]](list)
    if host is None:
        return devices
    begun, ends = [], dict[int, float]()
    for line in host.lines:
        if line.name == 'python':
            continue
        for event in line.events:
            stats = dict(event.stats)
            if '_c' in stats and event.name.startswith('end: '):
                ends[stats['_c']] = _window(event).end
            elif 'hlo_op' in stats and 'device_ordinal' in stats:
                begun.append((_window(event), stats))
    for window, stats in begun:
        end = max(window.end, ends.get(stats.get('_p', 0), window.end))
        end = min([end, *(step.end for step in steps if step.start <= window.start < step.end)])
        if _is_within(Window(window.start, end), steps):
            name, module = (sys.intern(str(stats[key])) for key in ('hlo_op', 'hlo_module'))
            event = Event(name, module, window.start, end)
            devices[int(stats['device_ordinal'])].append(event)
    return devices


def _is_within(window: Window, steps: Sequence[Window]) -> bool:
    """Return whether an event overlaps with a step."""
    return any(window.end > step.start and window.start < step.end for step in steps)


def _window(event: Any) -> Window:
    return Window(1e-9 * event.start_ns, 1e-9 * event.end_ns)
