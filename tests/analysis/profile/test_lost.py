"""Kernels that a trace lacks are noticed."""

from pathlib import Path

import pytest
from analysis.profile.gpu_run import FIRST, PROGRAM, SECOND, write_gpu_run

from megajax.analysis.profile import profile
from megajax.analysis.profile.report import tables
from megajax.base.render.console import as_text

FUSED = 'negate(%reduced)', 'fusion(%reduced), kind=kLoop, calls=%negated'
NEGATED = """
%negated (x: f32[8,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %negative = f32[8,16]{1,0} negate(%x)
}

ENTRY """


@pytest.mark.parametrize('lost', [0, 1])
def test_a_step_that_lost_its_last_kernel_is_noted_with_its_device(
    lost: int, tmp_path: Path
) -> None:
    second = [(name, start + 100, end + 100) for name, start, end in SECOND]
    devices = [[*ran, *second[: 3 - lost * number]] for number, ran in enumerate((FIRST, SECOND))]
    program = PROGRAM.replace(*FUSED).replace('\nENTRY ', NEGATED)
    result = profile(write_gpu_run(tmp_path / 'run', [devices], program=program, steps=(11, 12)))
    assert len(result.notes) == lost
    note = 'the trace has only 50.0% of the kernels of device 1 of process 0: the profiler dropped'
    assert (note in as_text(tables(result, top=9))) == bool(lost)
