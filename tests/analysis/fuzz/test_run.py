"""A file of random steps is continued, and its findings decide the exit code."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import gone
from support import disk_full_at, exhaustive
from support import megajax as run_here

from megajax.analysis.fuzz import draw as drawing
from megajax.analysis.fuzz import run
from megajax.analysis.fuzz.case import Case, Worst
from megajax.analysis.fuzz.draw import LAYOUTS, draw
from megajax.analysis.fuzz.execute import BEGUN, DONE, FOUND, UNABLE
from megajax.analysis.fuzz.run import fuzz, made_by, read
from megajax.analysis.inspect.child import EndedBySignal
from megajax.base.errors import ResourceError, StopRequested
from megajax.base.source import PACKAGE
from megajax.core.config import ConfigError
from megajax.core.hardware.targets import has_compiler
from megajax.runtime.processes.signals import STOPS
from megajax.xla.miscompiles import answers


def case(number: int, verdict: str = 'right', **updates: object) -> Case:
    config = draw(3, number).model_dump(mode='json', exclude_unset=True)
    worst = Worst(name='loss', error=0.5, limit=1e-5, wrong=int(verdict == 'wrong'), results=9)
    told = {'seed': 3, 'number': number, 'target': 'h100', 'fixed': [], 'config': config}
    told |= {**made_by('h100'), 'verdict': verdict, 'as_compiled': worst}
    return Case.model_validate(told | updates)


def written(path: Path, *cases: Case) -> Path:
    path.write_text(''.join(f'{each.model_dump_json()}\n' for each in cases))
    return path


def test_steps_in_the_file_are_not_executed_again_and_keep_their_order(tmp_path):
    file = written(tmp_path / 'it.jsonl', case(1), case(0))
    before = file.read_text()
    assert fuzz(file, seed=3, count=2, target='h100') == [case(0), case(1)]
    assert file.read_text() == before


@pytest.mark.parametrize('other', [{'compiler': ''}, {'step': ''}, {'jax_version': '0.9'}])
def test_a_step_of_another_compiler_or_source_is_executed_again(tmp_path, monkeypatch, other):
    started = children(monkeypatch, lambda number: '')
    file = written(tmp_path / 'it.jsonl', case(0, 'wrong', **other), case(1))
    assert fuzz(file, seed=3, count=2, target='h100') == [case(0), case(1)]
    assert started == [[0]]


# A process that compiles steps: the files that it imports, and its compiler.
PROCESS = """
import sys
import megajax.analysis.fuzz.execute
for name, module in [*sys.modules.items()]:
    if name.startswith('megajax.'):
        print(module.__file__)
from megajax.analysis.fuzz.run import made_by
print(made_by('h100')['compiler'])
"""
PRECISION = 'JAX_DEFAULT_MATMUL_PRECISION=highest'


@functools.cache
def lines_of_process(variable: str) -> list[str]:
    environment = os.environ | dict([variable.split('=')])
    done = subprocess.run(
        [sys.executable, '-c', PROCESS], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_source_of_a_step_has_all_that_its_process_imports():
    assert all((PACKAGE / part).exists() for part in run.SOURCE)
    *lines, _ = lines_of_process(PRECISION)
    files = [Path(line).relative_to(PACKAGE) for line in lines]
    assert Path('analysis/fuzz/execute.py') in files
    # These store, explain and render a case, or have the names of earlier versions.
    others = (
        *('base', 'old_names.py', 'analysis/__init__.py', 'runtime/__init__.py'),
        *(f'analysis/fuzz/{name}.py' for name in ('__init__', 'case', 'explain', 'time_limit')),
    )
    parts = *run.SOURCE, *others
    assert not [file for file in files if not any(file.is_relative_to(part) for part in parts)]


def test_another_flag_is_another_compiler_and_one_that_changes_no_program_is_not(monkeypatch):
    before = made_by('h100')
    monkeypatch.setenv('XLA_FLAGS', f'{os.environ["XLA_FLAGS"]} --xla_dump_to=/tmp')
    assert made_by('h100') == before
    monkeypatch.setenv('XLA_FLAGS', '--xla_gpu_enable_triton_gemm=false')
    assert made_by('h100')['compiler'] != before['compiler']
    assert made_by('b200')['compiler'] != made_by('h100')['compiler']


@pytest.mark.parametrize('variable', [PRECISION, exhaustive('JAX_REMAT3=1')])
def test_another_option_of_jax_is_another_compiler(variable):
    """The processes that compile the steps take it from the environment."""
    assert 'options' not in answers.compiler('h100')
    *_, compiler = lines_of_process(variable)
    assert compiler not in ('', made_by('h100')['compiler'])


def test_a_compiler_that_was_installed_anew_is_no_other(tmp_path, monkeypatch):
    (described := tmp_path / 'own-1.0.dist-info').mkdir()
    (described / 'METADATA').write_text('Name: own\nVersion: 1.0\n')
    (described / 'entry_points.txt').write_text('[jax_plugins]\nown = own_plugin\n')
    (library := tmp_path / 'own_plugin' / 'xla.so').parent.mkdir()
    library.write_text('a')
    without = made_by('h100')
    monkeypatch.syspath_prepend(tmp_path)
    before = made_by('h100')
    os.utime(library, (0, 0))
    assert made_by('h100') == before != without
    library.write_text('another one')
    assert made_by('h100') != before


def test_the_table_tells_how_many_steps_were_executed(tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    children(monkeypatch, lambda number: '')
    file = written(tmp_path / 'it.jsonl', case(0), case(2))
    done = run_here('inspect', 'fuzz', 3, '--seed', 3, '--out', file)
    assert f'1 executed, 2 from {file}' in done.stdout


@pytest.mark.parametrize(
    ('verdict', 'code'), [('right', 0), ('rejected', 0), ('wrong', 1), ('failed', 1)]
)
def test_the_exit_code_and_the_table_tell_findings(tmp_path, verdict, code):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    file = written(tmp_path / 'it.jsonl', case(0), case(1, verdict))
    done = run_here('inspect', 'fuzz', 2, '--seed', 3, '--out', file)
    assert done.returncode == code, done.stderr
    assert ('mesh.' in done.stdout) == bool(code)  # the config of a finding
    assert f'{verdict:8}  ' in done.stdout
    assert done.stdout.count('loss 5.0e-01 (limit 1.0e-05)') == code


def children(monkeypatch: pytest.MonkeyPatch, ends: Callable[[int], str]) -> list[list[int]]:
    """Replace the child processes; the numbers of each one. One ends where `ends` says why."""
    started: list[list[int]] = []
    done = case(0)

    def child(module, file, *, target, say, **_):
        task = json.loads(Path(file).read_text())
        expected = ('megajax.analysis.fuzz.execute', 'h100', 3)
        assert (module, target, task['about']['seed']) == expected
        started.append(task['numbers'])
        for number in task['numbers']:
            say(f'{BEGUN}{number}')
            if why := ends(number):
                name = why.split()[-1]
                raise EndedBySignal(name, why) if name.startswith('SIG') else RuntimeError(why)
            say('a line of the compiler')
            say(f'{DONE}{done.model_copy(update={"number": number}).model_dump_json()}')

    monkeypatch.setattr(run, 'call_in_child', child)
    return started


def test_a_step_that_ends_its_process_fails_and_another_process_does_the_rest(
    tmp_path, monkeypatch
):
    why = 'x' * run.MOST_CHARACTERS + 'SIGSEGV'
    started = children(monkeypatch, lambda number: why if number == 1 else '')
    file, said = tmp_path / 'new' / 'it.jsonl', []
    found = fuzz(file, seed=3, count=3, target='h100', say=said.append)
    assert started == [[0, 1, 2], [2]]
    assert [each.verdict for each in found] == ['right', 'failed', 'right']
    assert found[1].config == draw(3, 1).model_dump(mode='json', exclude_unset=True)
    assert [each.key for each in found] == [done.key for done in map(case, range(3))]
    assert found[1].message.startswith('the process ended: x')
    assert found[1].message.endswith('SIGSEGV')
    assert found == read(file) == said


@pytest.mark.parametrize('name', [each.name for each in STOPS])
def test_a_signal_that_stops_a_process_is_no_finding_and_starts_no_other(
    tmp_path, monkeypatch, name
):
    started = children(monkeypatch, lambda number: name if number == 1 else '')
    file = tmp_path / 'it.jsonl'
    with pytest.raises(StopRequested, match=f'{name} ended a process; the same command continues'):
        fuzz(file, seed=3, count=9 * LAYOUTS, target='h100')
    assert [each.number for each in read(file)] == [0]
    assert len(started) == 1


SLOW = f"""
import os, pathlib, subprocess, time
print('{BEGUN}0', flush=True)
for pid in os.getpid(), subprocess.Popen(['sleep', '300']).pid:
    pathlib.Path('at', str(pid)).touch()
time.sleep(300)
"""
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores both
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from megajax.analysis.fuzz import run
run.EXECUTE = 'slow'
from megajax.commands.main import main
main()
"""


@pytest.mark.parametrize(
    ('number', 'code'), [(each, 130 if each == signal.SIGINT else 75) for each in STOPS]
)
def test_a_signal_ends_all_processes_and_stores_nothing(tmp_path, number, code):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    (tmp_path / 'slow.py').write_text(SLOW)
    (at := tmp_path / 'at').mkdir()
    (folder := tmp_path / 'temporary').mkdir()
    command = [sys.executable, '-c', COMMAND, 'inspect', 'fuzz', '40', '--jobs', '2']
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {'TMPDIR': str(folder)},
        stderr=subprocess.PIPE,
        text=True,
    ) as done:
        until = time.monotonic() + 100
        while len([*at.iterdir()]) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        done.send_signal(number)
        assert done.wait(60) == code
        assert done.stderr.read().endswith(': the same command continues\n')
    assert len([*at.iterdir()]) == 4
    assert all(gone(int(process.name)) for process in at.iterdir())
    assert not [*folder.iterdir()]
    assert not (tmp_path / 'fuzz.jsonl').exists()


def test_the_command_exits_with_130_after_ctrl_c(tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, 'fuzz', interrupted)
    done = run_here('inspect', 'fuzz', 1, '--out', tmp_path / 'it.jsonl')
    assert (done.returncode, done.stderr) == (130, 'interrupted: the same command continues\n')


@pytest.mark.parametrize(
    ('jobs', 'fix', 'why'),
    [
        (1, 'on a machine with more memory, or fix smaller', 'SIGKILL'),
        (2, 'with fewer --jobs', 'std::bad_alloc SIGABRT'),
    ],
)
def test_a_step_without_enough_memory_has_no_case_and_the_others_are_executed(
    tmp_path, monkeypatch, jobs, fix, why
):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    file = tmp_path / 'it.jsonl'
    with monkeypatch.context() as patch:
        children(patch, lambda number: why if number == 1 else '')
        done = run_here('inspect', 'fuzz', 3, '--seed', 3, '--out', file, '--jobs', jobs)
    assert done.returncode == 75
    assert '1 of 3 steps were not executed: SIGKILL or SIGABRT' in done.stderr
    assert f'run the same command {fix}' in done.stderr
    assert [each.number for each in read(file)] == [0, 2]
    started = children(monkeypatch, lambda number: '')
    assert len(fuzz(file, seed=3, count=3, target='h100')) == 3
    assert started == [[1]]


def test_a_process_without_enough_memory_to_start_is_an_error(tmp_path, monkeypatch):
    def child(*_, **__):
        raise EndedBySignal('SIGKILL', 'SIGKILL ended it')

    monkeypatch.setattr(run, 'call_in_child', child)
    with pytest.raises(ResourceError, match='SIGKILL ended it; use fewer --jobs or more memory'):
        fuzz(tmp_path / 'it.jsonl', seed=3, count=1, target='h100')


def test_a_finding_stays_to_be_explained_if_explaining_it_needs_too_much_memory(
    tmp_path, monkeypatch
):
    wrong = case(0, 'wrong')

    def child(module, file, *, say, **_):
        say(f'{BEGUN}0')
        say(f'{FOUND}{wrong.model_dump_json()}')
        raise EndedBySignal('SIGKILL', '')

    monkeypatch.setattr(run, 'call_in_child', child)
    file = tmp_path / 'it.jsonl'
    found = fuzz(file, seed=3, count=1, target='h100', reports=tmp_path / 'it')
    assert found == read(file) == [wrong]


def test_a_machine_that_cannot_execute_steps_is_told_and_no_step_is_at_fault(tmp_path, monkeypatch):
    def child(module, file, *, say, **_):
        say(f'{BEGUN}0')
        say(f'{UNABLE}[Errno 28] No space left on device')
        raise RuntimeError('a traceback')

    monkeypatch.setattr(run, 'call_in_child', child)
    file = tmp_path / 'it.jsonl'
    with pytest.raises(ResourceError, match='No space left on device; the same command continues'):
        fuzz(file, seed=3, count=1, target='h100')
    assert read(file) == []


@pytest.mark.parametrize('culprit', ['', 'second (pipeline hlo_passes)'])
def test_a_finding_outlives_a_full_disk_and_is_minimized_again_unless_its_pass_is_known(
    tmp_path, monkeypatch, culprit
):
    wrong = case(0, 'wrong', smallest='a=1', culprit=culprit)

    def child(module, file, *, say, **_):
        say(f'{BEGUN}0')
        say(f'{FOUND}{wrong.model_dump_json()}')
        say(f'{UNABLE}[Errno 28] No space left on device')
        raise RuntimeError('a traceback')

    file, options = tmp_path / 'it.jsonl', {'seed': 3, 'count': 1, 'reports': tmp_path / 'it'}
    with monkeypatch.context() as patch:
        patch.setattr(run, 'call_in_child', child)
        with pytest.raises(ResourceError, match='No space left on device'):
            fuzz(file, target='h100', **options)
    assert [each.as_compiled for each in read(file)] == [wrong.as_compiled]
    started = children(monkeypatch, lambda number: '')
    fuzz(file, target='h100', **options)
    assert started == ([] if culprit else [[0]])


@pytest.mark.parametrize('jobs', [1, 2])
def test_a_full_disk_ends_the_run_and_leaves_whole_lines(tmp_path, monkeypatch, jobs):
    children(monkeypatch, lambda number: '')
    file = written(tmp_path / 'it.jsonl', case(0))
    size = file.stat().st_size
    with (
        disk_full_at(size * 3 - 20),
        pytest.raises(ResourceError, match=r'it\.jsonl: .*File too large; the same command'),
    ):
        fuzz(file, seed=3, count=2 * LAYOUTS, target='h100', jobs=jobs)
    assert file.read_text().endswith('}\n')
    assert len(read(file)) == 2


def test_a_process_that_ends_between_two_steps_is_started_again(tmp_path, monkeypatch):
    started = []

    def child(module, file, *, say, **_):
        started.append(numbers := json.loads(Path(file).read_text())['numbers'])
        for number in numbers[:2]:
            say(f'{BEGUN}{number}')
            say(f'{DONE}{case(number).model_dump_json()}')
        raise EndedBySignal('SIGSEGV', '')

    monkeypatch.setattr(run, 'call_in_child', child)
    found = fuzz(tmp_path / 'it.jsonl', seed=3, count=4, target='h100')
    assert started == [[0, 1, 2, 3], [2, 3]]
    assert [each.verdict for each in found] == ['right'] * 4


def test_an_error_ends_the_other_processes(tmp_path, monkeypatch):
    waiting, ended = threading.Event(), threading.Event()

    def child(module, file, *, started, say, **_):
        if 0 in json.loads(Path(file).read_text())['numbers']:
            waiting.wait(60)
            raise RuntimeError('no memory')
        started(SimpleNamespace(terminate=ended.set))
        waiting.set()
        ended.wait(60)
        raise EndedBySignal('SIGTERM', '')

    monkeypatch.setattr(run, 'call_in_child', child)
    with pytest.raises(RuntimeError, match='no memory'):
        fuzz(tmp_path / 'it.jsonl', seed=3, count=2 * LAYOUTS, target='h100', jobs=2)
    assert ended.is_set()


@pytest.mark.parametrize('culprit', ['', 'second (pipeline hlo_passes)'])
def test_a_finding_is_kept_if_explaining_it_ends_the_process(tmp_path, monkeypatch, culprit):
    wrong = case(0, 'wrong', smallest='a=1', culprit=culprit)

    def child(module, file, *, say, **_):
        say(f'{BEGUN}0')
        say(f'{FOUND}{wrong.model_dump_json()}')
        raise RuntimeError('SIGSEGV')

    monkeypatch.setattr(run, 'call_in_child', child)
    file, reports = tmp_path / 'it.jsonl', tmp_path / 'it'
    [found] = fuzz(file, seed=3, count=1, target='h100', reports=reports)
    expected = culprit or 'not found: the process ended: SIGSEGV'
    assert found == wrong.model_copy(update={'culprit': expected})
    assert fuzz(file, seed=3, count=1, target='h100', reports=reports) == read(file) == [found]


def test_findings_that_are_not_minimized_are_executed_again_to_be_minimized(tmp_path, monkeypatch):
    started = children(monkeypatch, lambda number: '')
    cases = case(0), case(1, 'wrong'), case(2, 'wrong', smallest='a=1'), case(3, 'failed')
    file = written(tmp_path / 'it.jsonl', *cases, case(4, 'failed', message=f'{run.ENDED}SIGSEGV'))
    options = {'seed': 3, 'count': 5, 'target': 'h100'}
    assert fuzz(file, **options) == read(file)
    assert started == []
    found = fuzz(file, **options, reports=tmp_path / 'it')
    assert started == [[1, 3]]
    assert read(file) == found
    assert [each.verdict for each in found] == ['right', 'right', 'wrong', 'right', 'failed']


@pytest.mark.parametrize('name', ['it', 'it.jsonl'])
def test_a_file_in_the_place_of_the_findings_is_rejected(tmp_path, name):
    written(tmp_path / 'it', case(0))
    done = run_here('inspect', 'fuzz', 1, '--out', tmp_path / name, '--minimize')
    assert done.returncode == 2
    assert 'it-found.jsonl' in done.stderr


def test_a_process_that_ends_before_a_step_is_an_error(tmp_path, monkeypatch):
    def child(*_, **__):
        raise RuntimeError('no memory')

    monkeypatch.setattr(run, 'call_in_child', child)
    with pytest.raises(RuntimeError, match='no memory'):
        fuzz(tmp_path / 'it.jsonl', seed=3, count=1, target='h100')


@pytest.mark.parametrize(('jobs', 'models'), [(1, [[0, 1, 2], [3, 4]]), (2, [[0, 1], [2, 3], [4]])])
def test_a_process_executes_all_layouts_of_a_few_models(tmp_path, monkeypatch, jobs, models):
    started = children(monkeypatch, lambda number: '')
    monkeypatch.setattr(run, 'MOST_STEPS', 3 * LAYOUTS + 1)
    found = fuzz(tmp_path / 'it.jsonl', seed=3, count=5 * LAYOUTS, target='h100', jobs=jobs)
    assert [each.number for each in found] == [*range(5 * LAYOUTS)]
    assert (
        sorted([*dict.fromkeys(number // LAYOUTS for number in each)] for each in started) == models
    )


def test_an_unfinished_last_line_is_not_a_step_and_another_fault_is_rejected(tmp_path):
    file = written(tmp_path / 'it.jsonl', case(0), case(1))
    text = file.read_text()
    file.write_text(text[:-20])
    assert read(file) == [case(0)]
    file.write_text('{}\n' + text)
    with pytest.raises(ConfigError, match='was not written by megajax inspect fuzz'):
        read(file)


def test_the_list_has_a_config_per_line_and_compiles_nothing(tmp_path):
    done = run_here('inspect', '--fuzz', 3, '--list', 'mesh.context=2', folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all('mesh.context=2' in line for line in lines)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('missed', [0, 1])
def test_the_list_goes_on_after_a_step_that_cannot_be_drawn(monkeypatch, missed):
    def drawn(seed, number, fixed):
        if number == missed:
            raise ConfigError('found no config:', 'mesh.data: 3')
        return draw(seed, number, fixed)

    monkeypatch.setattr(drawing, 'draw', drawn)
    done = run_here('inspect', 'fuzz', 3, '--list')
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ['0', '1', '2']
    assert lines[missed] == f'{missed}  rejected  found no config: mesh.data: 3'


def test_settings_of_which_no_model_can_be_drawn_end_with_2(monkeypatch):
    def drawn(seed, number, fixed):
        raise ConfigError('found no config:', 'mesh.data: 3')

    monkeypatch.setattr(drawing, 'draw', drawn)
    done = run_here('inspect', 'fuzz', 3, '--list')
    assert (done.returncode, done.stdout) == (2, '')
    assert 'found no config' in done.stderr


def test_a_cpu_is_no_target():
    done = run_here('inspect', 'fuzz', 1, '--target', 'cpu')
    assert done.returncode == 2
    assert 'use --target h100' in done.stderr


@pytest.mark.slow
def test_random_steps_are_executed_and_a_later_call_continues(tmp_path):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    file, fixed = tmp_path / 'it.jsonl', ('model.num_layers=1', 'train.dtype=float32')
    first = fuzz(file, seed=3, count=1, target='h100', fixed=fixed)
    both = fuzz(file, seed=3, count=2, target='h100', fixed=fixed)
    assert both == read(file)
    assert both[:1] == first
    assert [each.verdict for each in both] == ['right', 'right']
    assert all(each.as_compiled.error > 0 for each in both)  # another program
