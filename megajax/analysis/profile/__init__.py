"""Analyze where the time of traced steps went, from the trace that a run wrote.

The trace shows how long each instruction ran. The program stored with it shows what each
instruction computes or sends.
"""

from pathlib import Path

from megajax.analysis.profile.attribute import (
    Devices,
    collective_lines,
    device_lines,
    instruction_lines,
    parts,
    process_lines,
    product_lines,
)
from megajax.analysis.profile.lost import lost_kernels
from megajax.analysis.profile.measure import in_mesh_order, measure
from megajax.analysis.profile.predict import predictions
from megajax.analysis.profile.result import Prediction, Profile
from megajax.analysis.profile.traced import Traced, read_traced
from megajax.analysis.profile.work import ProgramWork
from megajax.core.config import ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import Hardware, hardware, hardware_of

__all__ = ['Profile', 'profile']


def profile(run: str | Path, *, gpu: str | None = None) -> Profile:
    """Read the trace that a run wrote (`train.profile`) and return where its time went.

    `gpu` names the record of the GPU, or its YAML file; the default is the GPU that the trace
    names. Raises ConfigError if the run has no trace, or if the trace cannot be read.
    """
    run = Path(run)
    traced = read_traced(run)
    found = traced.traces[0].gpu
    record = hardware(gpu) if gpu else hardware_of(found) if found else None
    return _profile(run, traced, record)


def _profile(run: Path, traced: Traced, record: Hardware | None) -> Profile:
    program, traces = traced.program, traced.traces
    on_gpu = traces[0].gpu is not None
    config = resolved(traced.config, on_gpu=on_gpu)
    per_host = program.num_devices // len({trace.host for trace in traces})
    record = record and record.shared(per_host)
    work = ProgramWork(program, config, config.mesh.sizes, record, per_host)
    measured = measure(traces, traced.steps, traced.module, work)
    lines = device_lines(measured, work)
    order = sorted(range(len(lines)), key=lambda place: lines[place].own)
    median, slowest = order[(len(order) - 1) // 2], order[-1]
    devices = Devices(in_mesh_order(measured, traces), measured[median], measured[slowest])
    processes = process_lines(traces, lines)
    expected, reason = list[Prediction](), None
    if record:
        try:
            given = record, devices.median, program.num_devices, per_host
            expected = predictions(config, work, *given)
        except ConfigError as error:
            reason = str(error)
    return Profile(
        run=str(run),
        steps=traced.steps,
        notes=[*traced.left_out, *lost_kernels(measured, work)],
        mesh=dict(config.mesh.sizes),
        device=traces[0].gpu or 'cpu',
        hardware=record.name if record else None,
        parts=parts(devices, work),
        products=product_lines(devices, work),
        collectives=collective_lines(devices, work),
        instructions=instruction_lines(devices, work),
        devices=lines,
        median_device=median,
        slowest_device=slowest,
        processes=processes,
        slowest_process=max(processes, key=lambda process: process.own).process,
        predictions=expected,
        not_predicted=reason,
    )
