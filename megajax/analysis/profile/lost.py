"""Notice that a trace lacks kernels: a profiler drops events once its buffer is full."""

from collections.abc import Iterator, Sequence

from megajax.analysis.profile.measure import Measured
from megajax.analysis.profile.work import ProgramWork
from megajax.xla.hlo.launches import launching
from megajax.xla.hlo.program import Program

# Share of the kernels that may be missing: of two cheap branches, the program counts both.
TOLERATED = 0.02


def lost_kernels(devices: Sequence[Measured], work: ProgramWork) -> list[str]:
    """Return a note on the device that lacks the most kernels, if it lacks more than TOLERATED.

    Only fusions are counted: each run is one kernel. Fusions that no device has may have been
    launched in another way, and do not count.
    """
    traced = {name for device in devices for name in device.runs}
    times = {name: runs for name, runs in _fusions(work.program) if name in traced}
    if not times:
        return []
    launches, worst = min(
        ((sum(map(device.launches, times)), device) for device in devices), key=lambda each: each[0]
    )
    share = launches / sum(times.values())
    if share >= 1 - TOLERATED:
        return []
    return [
        f'the trace has only {share:.1%} of the kernels of device {worst.device} of process '
        f'{worst.process}: the profiler dropped events, and times are too short and idle time is '
        'too long; trace fewer steps'
    ]


def _fusions(program: Program) -> Iterator[tuple[str, int]]:
    """Yield the name of each fusion that surely runs, and how often it runs in a step."""
    for computation in launching(program):
        times = program.times[computation.name]
        if times and computation.name not in program.runs.at_most:
            for instruction in computation.instructions:
                if instruction.opcode == 'fusion':
                    yield instruction.name, times
