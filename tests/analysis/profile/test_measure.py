"""What an instruction takes in a step is its mean over all traced steps."""

from pathlib import Path

import pytest
from analysis.profile.gpu_run import FIRST, PROGRAM, SECOND, write_gpu_run

from megajax.analysis.profile import profile
from megajax.analysis.profile.intervals import Idle
from megajax.analysis.profile.measure import Measured, Runs
from megajax.analysis.profile.work import ProgramWork
from megajax.core.config import load
from megajax.xla.hlo.program import Program


def test_runs_are_divided_by_the_number_of_steps() -> None:
    runs = {'dot.1': Runs(seconds=[0.1, 0.2, 0.3, 0.4], shares=[0.1, 0.1, 0.2, 0.2])}
    device = Measured(process=0, device=0, num_steps=2, step=1.0, idle=Idle(0, 0, 0), runs=runs)
    assert device.launches('dot.1') == 2
    assert device.seconds('dot.1') == pytest.approx(0.5)
    assert device.share('dot.1') == pytest.approx(0.3)
    assert device.launches('another') == device.seconds('another') == 0


def test_the_fastest_device_of_a_group_has_waited_for_no_other_of_it(tmp_path: Path) -> None:
    """The second link is half as fast. Its devices are of processes whose numbers do not adjoin."""
    program = PROGRAM.replace('num_partitions=2', 'num_partitions=4')
    program = program.replace('{{0,1}}', '{{0,1},{2,3}}')
    slow = [[('dot', 10, end), ('reduce', end, 60), ('result', 60, 70)] for end in (30, 40)]
    processes = [[FIRST], [slow[0]], [SECOND], [slow[1]]]
    run = write_gpu_run(
        tmp_path / 'run', processes, 'mesh.data=2', program=program, hosts=['a', 'b', 'a', 'b']
    )
    (line,) = profile(run).collectives
    assert line.transfer_seconds == pytest.approx(10e-6)
    assert line.bytes_per_second == pytest.approx(8 * 16 * 4 / 10e-6)
    assert line.slowest_bytes_per_second == pytest.approx(line.bytes_per_second / 2)
    assert line.slowest_processes == [1, 3]


def test_the_pairs_of_a_ring_are_a_group(tmp_path: Path) -> None:
    permute = 'collective-permute-start(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}'
    program = PROGRAM.replace('num_partitions=2', 'num_partitions=4')
    program = program.replace(
        'all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add', permute
    ).replace('all-reduce-done', 'collective-permute-done')
    work = ProgramWork(Program(program), load('tiny'), {'data': 2, 'model': 2}, None, 4)
    assert sorted(work.of('reduce').groups) == [(0, 1), (2, 3)]
