"""Where the time of traced steps went: on simulated devices, and on GPUs with a trace by hand."""

import gzip
import re
import shutil
from pathlib import Path

import pytest
import runs
from analysis.profile.gpu_run import FIRST, SECOND, write_gpu_run
from support import write_run
from typer.testing import CliRunner

from megajax.analysis.inspect.products import count_products
from megajax.analysis.profile import Profile, profile
from megajax.analysis.profile.work import peak_of
from megajax.commands.main import app
from megajax.core.config import ConfigError, load
from megajax.core.hardware.records import hardware
from megajax.xla.hlo.program import Program

H100 = hardware('h100')


@pytest.fixture(scope='module')
def result(traced_run: Path) -> Profile:
    return profile(traced_run)


def program_of(run: Path) -> Program:
    return Program(gzip.decompress((run / 'profile/step.hlo.gz').read_bytes()).decode())


def test_the_parts_of_every_device_add_up_to_its_step(result):
    assert len(result.devices) == 4
    for device in result.devices:
        assert device.kernels + device.exposed + device.idle == pytest.approx(device.step)
        assert min(device.kernels, device.exposed, device.idle) > 0
    assert sum(part.median for part in result.parts) == pytest.approx(result.median.step)
    assert sum(part.slowest for part in result.parts) == pytest.approx(result.slowest.step)


def test_each_instruction_runs_as_often_as_the_program_says_and_nothing_else_does(
    result, traced_run
):
    program = program_of(traced_run)
    times = {
        instruction.name: program.times[computation.name]
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    opcodes = {
        instruction.name: instruction.opcode
        for computation in program.computations.values()
        for instruction in computation.instructions
    }
    assert 'while' not in {opcodes[line.name] for line in result.instructions}
    launches = {line.name: line.launches for line in result.instructions}
    assert launches == {name: times[name] for name in launches}
    called = {name: times[name] for name in times if name.startswith(('all-reduce', 'all-gather'))}
    assert called == {line.name: line.launches for line in result.instructions if line.axis}


def test_the_products_are_those_that_inspect_counts(result, traced_run):
    config = load(traced_run / 'config.yaml')
    counted = count_products(config, program_of(traced_run), 'cpu')
    assert sum(line.flops for line in result.products) == counted.compiled
    for line in result.products:
        assert line.flops_per_second == pytest.approx(line.flops / line.seconds)
    head = next(line for line in result.products if (line.site, line.phase) == ('head', 'forward'))
    assert head.what == '[64, 32] [32, 512]'  # tokens, width, half of the padded vocabulary


def test_a_collective_is_exposed_or_hidden_and_takes_no_longer_than_its_last_device(result):
    assert {line.axis for line in result.collectives} == {'data', 'model'}
    for line in result.collectives:
        assert line.exposed_seconds + line.hidden_seconds == pytest.approx(line.seconds)
        assert 0 < line.transfer_seconds <= line.seconds + 1e-9
        assert line.bytes_per_second == pytest.approx(line.wire_bytes / line.transfer_seconds)


def test_without_a_record_there_is_no_peak_and_with_one_there_is(result, traced_run):
    assert result.hardware is None
    assert not result.predictions
    assert {line.peak_share for line in result.products} == {None}
    beside = profile(traced_run, gpu='h100')
    for line in beside.products:
        assert line.peak_share == pytest.approx(line.flops_per_second / H100.peak_flops['float32'])
    *lines, step = beside.predictions
    for of in ('measured', 'roofline', 'plan'):
        assert sum(getattr(line, of) for line in lines) == pytest.approx(getattr(step, of))
    assert step.measured == pytest.approx(result.median.step)
    assert all(line.predicted_seconds for line in beside.products)


def test_on_gpus_a_transfer_of_another_stream_is_hidden_beside_kernels(tmp_path):
    result = profile(write_gpu_run(tmp_path / 'run', [[FIRST, SECOND]]))
    assert (result.device, result.hardware) == (H100.device_kinds[0], H100.name)
    first, second = result.devices
    micro = 1e-6
    assert (first.kernels, first.exposed, first.idle) == pytest.approx((3e-5, 2e-5, 5e-5))
    assert (second.kernels, second.exposed, second.idle) == pytest.approx((4e-5, 1e-5, 5e-5))
    assert (result.median, result.slowest) == (first, second)
    (product,) = result.products
    assert product.what == '[16, 64] [64, 32]'
    assert product.flops_per_second == pytest.approx(2 * 16 * 64 * 32 / (20 * micro))
    assert product.peak_share == pytest.approx(product.flops_per_second / 494.7e12)
    (reduce,) = result.collectives
    assert (reduce.axis, reduce.kind) == ('model', 'all-reduce')
    times = reduce.seconds, reduce.exposed_seconds, reduce.hidden_seconds, reduce.transfer_seconds
    assert times == pytest.approx((3e-5, 2e-5, 1e-5, 1e-5))
    assert reduce.bytes_per_second == pytest.approx(8 * 16 * 4 / (10 * micro))
    assert [part.median for part in result.parts if part.kind == 'idle'] == pytest.approx(
        [10 * micro, 10 * micro, 30 * micro]
    )


def test_without_the_link_that_a_step_uses_only_the_prediction_of_it_is_missing(tmp_path):
    (file := tmp_path / 'mine.yaml').write_text(
        H100.model_copy(update={'across_hosts': None}).model_dump_json()
    )
    result = profile(write_gpu_run(tmp_path / 'run', [[FIRST], [SECOND]]), gpu=str(file))
    assert result.not_predicted.startswith('across_hosts: the link between hosts of')
    assert not result.predictions
    assert [line.predicted_seconds for line in result.collectives] == [None]
    assert [line.peak_share > 0 for line in result.products] == [True]


def test_the_report_sums_the_parts_of_each_kind_and_of_the_step(tmp_path):
    code, said = ask(write_gpu_run(tmp_path / 'run', [[FIRST, SECOND]]))
    assert code == 0
    assert ', step 11, data=1 x model=2, ' in said
    rows = [line.split() for line in said.splitlines()]
    assert ['kernels', '2', '0.03', '30.0%', '0.04'] in rows
    assert ['exposed', 'transfers', '1', '0.02', '20.0%', '0.01'] in rows
    assert ['idle', '0.05', '50.0%', '0.05'] in rows
    assert ['total', '3', '0.10', '100.0%', '0.10'] in rows


def test_kernels_of_a_cuda_graph_are_counted_apart_and_the_report_says_what_to_do(tmp_path):
    run = write_gpu_run(tmp_path / 'run', [[[*FIRST, ('command_buffer.1', 70, 80)], SECOND]])
    (graph,) = (part for part in profile(run).parts if part.name == 'CUDA graph')
    assert (graph.kind, graph.median) == ('kernels', pytest.approx(1e-5))
    code, said = ask(run)
    assert code == 0
    assert '0.01 ms are in CUDA graphs' in said
    assert 'XLA_FLAGS=--xla_gpu_enable_command_buffer=' in said


def test_the_slowest_process_is_the_one_that_the_others_wait_for(tmp_path):
    result = profile(str(write_gpu_run(tmp_path / 'run', [[FIRST], [SECOND]])))
    assert [line.host for line in result.processes] == ['node-0', 'node-1']
    assert result.slowest_process == 1
    assert [line.behind for line in result.processes] == pytest.approx([0, 1e-5])


def test_traces_of_more_processes_than_the_program_has_are_of_an_older_mesh(tmp_path):
    result = profile(write_gpu_run(tmp_path / 'run', [[FIRST], [SECOND], [FIRST]]))
    assert len(result.processes) == len(result.devices) == 2


def ask(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ['profile', *map(str, arguments)])
    error = done.exception
    return (error.exit_code, str(error)) if isinstance(error, ConfigError) else (
        done.exit_code, done.output
    )  # fmt: skip


def test_the_command_prints_every_table_and_writes_what_it_knows(traced_run, result, tmp_path):
    code, said = ask(traced_run, '--top', '3', '--gpu', 'h100', '--json', tmp_path / 'it.json')
    assert code == 0, said
    for title in (
        'time of a step, divided',
        'matmuls',
        'collectives',
        'predicted',
        '3 longest instructions',
    ):
        assert title in said
    first, last = result.steps[0], result.steps[-1]
    assert f', steps {first} to {last}, ' in said
    assert result.instructions[0].name in said
    assert re.search(r'^(data|model) +all-reduce ', said, re.MULTILINE)
    written = Profile.model_validate_json((tmp_path / 'it.json').read_text())
    assert written == profile(traced_run, gpu='h100')
    code, said = ask(traced_run)
    assert 'the peak of this CPU is not known; ' in said
    assert 'longest instructions' not in said


def without(run: Path, folder: Path, pattern: str) -> Path:
    """A copy of a run without some files of its trace."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns('checkpoints', pattern))
    return folder


def test_a_run_without_a_trace_that_can_be_read_is_a_mistake_with_a_fix(traced_run, tmp_path):
    assert ask(tmp_path) == (2, f'{tmp_path} is not a run directory: give the folder that megajax '
                             'train printed after `run`')  # fmt: skip
    untraced = without(traced_run, tmp_path / 'untraced', 'profile')
    code, said = ask(untraced)
    assert code == 2
    assert f'{untraced} holds no trace of a step' in said
    assert f"megajax train run.dir={untraced} 'train.profile={{start: 0, steps: 3}}'" in said
    unfinished = without(traced_run, tmp_path / 'unfinished', '*.xplane.pb')
    assert 'holds no trace of a step' in ask(unfinished)[1]
    code, said = ask(without(traced_run, tmp_path / 'old', 'step.hlo.gz'))
    assert code == 2
    assert 'step.hlo.gz, the program of the traced steps, cannot be read' in said


def test_a_trace_of_other_devices_or_another_program_is_a_mistake(traced_run, tmp_path):
    run = write_gpu_run(tmp_path / 'gpu', [[FIRST]])
    with pytest.raises(ConfigError, match=r'of 1 devices, the program is for 2: copy the traces'):
        profile(run)
    other = without(traced_run, tmp_path / 'other', 'nothing')
    text = gzip.decompress((other / 'profile/step.hlo.gz').read_bytes()).decode()
    renamed = gzip.compress(text.replace('fusion', 'infusion').replace('copy.', 'kopy.').encode())
    (other / 'profile/step.hlo.gz').write_bytes(renamed)
    with pytest.raises(ConfigError, match='not of the program stored with them'):
        profile(other)


def test_products_of_either_8_bit_format_have_the_peak_of_fp8():
    assert {peak_of(H100, dtype) for dtype in ('f8e4m3fn', 'f8e5m2')} == {H100.peak_flops['fp8']}
    assert peak_of(H100, 's32') is None


@pytest.mark.slow
def test_two_processes_have_a_trace_each_of_the_same_program(tmp_path):
    folder = write_run(tmp_path, runs.CONFIG)
    runs.train(folder, 'train.steps=3', 'train.profile={start: 1, steps: 2}', processes=2)
    result = profile(folder / 'run')
    assert result.steps == [2, 3]
    assert [line.process for line in result.devices] == [0, 0, 1, 1]
    assert min(line.behind for line in result.processes) == 0
    for device in result.devices:
        assert device.kernels + device.exposed + device.idle == pytest.approx(device.step)
    assert sum(line.flops for line in result.products) == (
        count_products(load(folder / 'run/config.yaml'), program_of(folder / 'run'), 'cpu').compiled
    )
