"""Turn measured steps into lines of the result, grouped by the work of the instructions."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from megajax.analysis.profile.measure import Group, Measured, fastest
from megajax.analysis.profile.result import (
    CollectiveLine,
    DeviceLine,
    InstructionLine,
    MeasuredLine,
    Part,
    ProcessLine,
    ProductLine,
)
from megajax.analysis.profile.trace import Trace
from megajax.analysis.profile.work import PRODUCTS, ProgramWork, Work, peak_of

Key = TypeVar('Key', bound=tuple[Any, ...])
Line = TypeVar('Line', bound=MeasuredLine)

_IDLE = 'before the first kernel', 'between kernels', 'after the last kernel'


class Devices(NamedTuple):
    """All devices in the order of the mesh; the median and the slowest device by their own time."""

    every: list[Measured]
    median: Measured
    slowest: Measured


def device_lines(devices: Sequence[Measured], work: ProgramWork) -> list[DeviceLine]:
    """Return a line for the step of each device."""
    return [_device(device, work) for device in devices]


def _device(device: Measured, work: ProgramWork) -> DeviceLine:
    exposed = sum(device.share(name) for name in device.runs if work.of(name).is_transfer)
    kernels = sum(device.share(name) for name in device.runs if not work.of(name).is_transfer)
    return DeviceLine(
        process=device.process,
        device=device.device,
        step=device.step,
        kernels=kernels,
        exposed=exposed,
        idle=sum(device.idle),
    )


def process_lines(traces: Sequence[Trace], devices: Sequence[DeviceLine]) -> list[ProcessLine]:
    """Return a line for the step of each process."""
    of_process = [
        [device for device in devices if device.process == process]
        for process in range(len(traces))
    ]
    own = [fmean(device.own for device in inside) for inside in of_process]
    median = sorted(own)[(len(own) - 1) // 2]
    return [
        ProcessLine(
            process=process,
            host=trace.host,
            step=fmean(device.step for device in inside),
            own=seconds,
            behind=seconds - median,
        )
        for process, (trace, inside, seconds) in enumerate(
            zip(traces, of_process, own, strict=True)
        )
    ]


def parts(devices: Devices, work: ProgramWork) -> list[Part]:
    """Return the parts of the step, longest first, then idle time; all lines add up to the step."""

    def key(each: Work) -> tuple[Literal['kernels', 'exposed'], str]:
        if each.is_transfer:
            return 'exposed', f'{each.kind} over {each.axis or "no axis"}'
        return 'kernels', each.kind

    found = [
        Part(
            kind=kind,
            name=name,
            launches=sum(map(devices.median.launches, names)),
            median=sum(map(devices.median.share, names)),
            slowest=sum(map(devices.slowest.share, names)),
        )
        for (kind, name), names in _grouped(devices, work, key).items()
    ]
    idle = zip(_IDLE, devices.median.idle, devices.slowest.idle, strict=True)
    return [
        *sorted(found, key=lambda part: (part.kind != 'kernels', -part.median)),
        *(
            Part(kind='idle', name=name, launches=0, median=median, slowest=slowest)
            for name, median, slowest in idle
        ),
    ]


def product_lines(devices: Devices, work: ProgramWork) -> list[ProductLine]:
    """Return the matmuls by kind, sizes and site, longest first."""
    groups = _grouped(
        devices,
        work,
        lambda each: (each.kind, each.what, each.dtype, each.site, each.phase),
        lambda each: each.kind in PRODUCTS,
    )
    return _longest(_product(devices, names, work) for names in groups.values())


def _product(devices: Devices, names: list[str], work: ProgramWork) -> ProductLine:
    first = work.of(names[0])
    flops = sum(_runs(devices, name, work) * work.of(name).flops for name in names)
    seconds = sum(map(devices.median.seconds, names))
    rate = flops / seconds if seconds else None
    peak = peak_of(work.gpu, first.dtype) if work.gpu else None
    return ProductLine(
        **_measured(devices, names, work),
        dtype=first.dtype,
        flops=flops,
        flops_per_second=rate,
        peak_share=rate / peak if rate and peak else None,
    )


def collective_lines(devices: Devices, work: ProgramWork) -> list[CollectiveLine]:
    """Return the collectives by axis, kind and site, longest first."""
    groups = _grouped(
        devices,
        work,
        lambda each: (each.axis, each.kind, each.site, each.phase),
        lambda each: each.is_transfer,
    )
    return _longest(_collective(devices, names, work) for names in groups.values())


def _collective(devices: Devices, names: list[str], work: ProgramWork) -> CollectiveLine:
    seconds, exposed = (
        sum(map(of, names)) for of in (devices.median.seconds, devices.median.share)
    )
    wire = sum(_runs(devices, name, work) * work.of(name).wire_bytes for name in names)
    in_groups = defaultdict[Group, float](float)
    for name in names:
        for group, of_group in fastest(devices.every, work.of(name).groups, name).items():
            in_groups[group] += of_group
    place = next(i for i, device in enumerate(devices.every) if device is devices.median)
    transfer = sum(of_group for group, of_group in in_groups.items() if place in group)
    slowest, slowest_seconds = max(in_groups.items(), key=lambda item: item[1], default=((), 0.0))
    return CollectiveLine(
        **_measured(devices, names, work),
        axis=work.of(names[0]).axis,
        wire_bytes=wire,
        exposed_seconds=exposed,
        hidden_seconds=seconds - exposed,
        transfer_seconds=transfer,
        bytes_per_second=wire / transfer if transfer else None,
        slowest_bytes_per_second=wire / slowest_seconds if wire and slowest_seconds else None,
        slowest_processes=sorted({devices.every[place].process for place in slowest}),
    )


def instruction_lines(devices: Devices, work: ProgramWork) -> list[InstructionLine]:
    """Return every instruction with an event, longest first."""
    return _longest(
        InstructionLine(
            **_measured(devices, [name], work),
            name=name,
            axis=work.of(name).axis,
            source=work.of(name).source,
        )
        for name in _names(devices)
    )


def _measured(devices: Devices, names: list[str], work: ProgramWork) -> dict[str, Any]:
    first = work.of(names[0])
    known = work.gpu is not None and all(work.of(name).predicted is not None for name in names)
    predicted = (
        _runs(devices, name, work) * (work.of(name).predicted or 0.0) for name in names if known
    )
    return dict(
        kind=first.kind,
        what=' and '.join(dict.fromkeys(work.of(name).what for name in names)),
        site=first.site,
        phase=first.phase,
        launches=sum(map(devices.median.launches, names)),
        seconds=sum(map(devices.median.seconds, names)),
        slowest_seconds=sum(map(devices.slowest.seconds, names)),
        share=sum(map(devices.median.share, names)),
        predicted_seconds=sum(predicted) if known else None,
    )


def _runs(devices: Devices, name: str, work: ProgramWork) -> float:
    """Return how often an instruction runs in a step; a run may launch several kernels."""
    launches = devices.median.launches(name)
    return min(launches, work.of(name).times or launches)


def _grouped(
    devices: Devices,
    work: ProgramWork,
    key: Callable[[Work], Key],
    belongs: Callable[[Work], bool] = lambda _: True,
) -> dict[Key, list[str]]:
    """Group the names of the instructions for which `belongs` is true, by their key."""
    groups = defaultdict[Key, list[str]](list)
    for name in _names(devices):
        if belongs(work.of(name)):
            groups[key(work.of(name))].append(name)
    return groups


def _names(devices: Devices) -> list[str]:
    return [*dict.fromkeys(name for device in devices.every for name in device.runs)]


def _longest(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -line.seconds)
