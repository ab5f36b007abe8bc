"""The measurements of a GPU run to their end wherever they are, each whatever befalls the
others.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, load_script

from megajax.analysis.profile import profile
from megajax.core.config.rules import incompatibilities
from megajax.core.hardware.records import hardware, hardware_names

script, step = load_script('gpu'), load_script('gpu_step')
rank, commands = load_script('gpu_rank'), load_script('gpu_commands')
NAMES = [one.name for one in script.MEASUREMENTS]


def measure(out: Path, *options: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, 'benchmarks/gpu.py', '--small', '--out', str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1600, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (out / 'results.jsonl').read_text().splitlines()] == lines
    return {line.pop('name'): line for line in lines}


@pytest.mark.slow
def test_each_measurement_is_a_line(tmp_path: Path) -> None:
    found = measure(tmp_path, '--only', 'machine', 'products')
    assert [*found] == ['machine', 'products']
    assert found['machine']['versions']['jax']
    assert len(found['products']['tflops']) == 12


def test_a_measurement_that_fails_is_a_line_too(tmp_path: Path) -> None:
    environment = script.prepared(None, tmp_path, small=True)
    found = script.run_one(
        script.Measurement('step-none', 60, 'a step that there is not'), tmp_path, environment, 60
    )
    assert found['failed'] == "exit 1: KeyError: 'none'"


def test_without_time_nothing_is_begun_and_all_is_said(tmp_path: Path) -> None:
    assert measure(tmp_path, '--seconds', '1') == {
        name: {'skipped': 'no time was left'} for name in NAMES
    }


def test_a_measurement_that_hangs_ends_at_its_limit(tmp_path: Path) -> None:
    found = script.run_one(
        script.MEASUREMENTS[0], tmp_path, script.prepared(None, tmp_path, small=True), 0.2
    )
    assert found == {'name': 'machine', 'failed': 'was not done in 0 s'}


def test_a_gpu_that_is_too_small_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(script, 'run_one', lambda one, *_: {'name': one.name, 'gigabytes': 80.0})
    found = {
        line.pop('name'): line for line in script.run_all(script.MEASUREMENTS, tmp_path, {}, 480)
    }
    assert {name for name, line in found.items() if 'skipped' in line} == {
        'step-1.2b-32',
        'step-4.2b',
        'step-llama',
        'torch-llama',
    }


@pytest.mark.parametrize(
    ('visible', 'asked'),
    [(None, '0'), ('', '0'), ('3', '3'), ('GPU-5e1f, 2', 'GPU-5e1f'), ('6,7', '6')],
)
def test_the_sensors_are_those_of_the_gpu_that_is_measured(
    visible: str | None, asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tool := tmp_path / 'nvidia-smi').write_text('#!/bin/sh\necho "$1"\n')
    tool.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if visible is not None:
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', visible)
    assert step.query('power.draw') == f'--id={asked}'


def test_what_is_right_comes_before_what_is_fast() -> None:
    kinds = [*dict.fromkeys(name.partition('-')[0] for name in NAMES)]
    assert kinds[:7] == [
        'machine',
        'numerics',
        'losses',
        'deterministic',
        'repeated',
        'rank',
        'step',
    ]
    assert sum(one.seconds for one in script.MEASUREMENTS if one.gigabytes <= 80) < 45 * 60


def test_each_measurement_has_a_program(tmp_path: Path) -> None:
    named = {name.partition('-')[::2] for name in NAMES}
    assert {size for kind, size in named if kind == 'rank'} == {*rank.JOBS} == {*rank.SMALL_MESH}
    assert {size for kind, size in named if kind == 'step'} == {*step.SIZES}


@pytest.mark.parametrize('job', rank.JOBS)
def test_a_rank_of_a_large_job_is_a_config_that_runs(
    job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, 'SMALL', False)
    config, hosts = rank.config_of(job)
    assert config.mesh.num_devices == 8 * hosts
    assert not incompatibilities(config)


def test_a_rank_is_compared_with_the_gpu_that_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for record in map(hardware, hardware_names()):
        for kind in record.device_kinds:
            has_links = record.inside_host and record.across_hosts
            assert hardware(rank.compared_with(kind)) == (record if has_links else hardware('h100'))
    assert rank.compared_with('cpu') == 'h100'
    monkeypatch.setattr(rank, 'SMALL', False)
    config, _ = rank.config_of('8b-tp8')
    planned = [rank.planned(config, gpu)['planned_compute_ms'] for gpu in ('NVIDIA H200', 'h100')]
    assert planned[0] < planned[1]


@pytest.mark.parametrize('failing', [None, 0, 1, 2])
def test_runs_are_equal_only_if_all_of_them_trained(
    failing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[list[str]]()

    def command(folder: Path, *arguments: str) -> dict[str, Any]:
        """Write losses as a run does; a run that fails leaves those of an earlier run."""
        keys = dict(word.split('=', 1) for word in arguments if '=' in word)
        calls.append([*keys])
        if failing == (len(calls) - 1) % 3:
            return {'code': 1, 'said': 'no checkpoint is valid'}
        assert ('run.resume' in keys) == (len(calls) % 3 == 0)
        run = folder / keys['run.dir']
        (run / 'checkpoints' / keys['train.steps']).mkdir(parents=True)
        lines = [{'step': step, 'loss': 6.0} for step in range(1, int(keys['train.steps']) + 1)]
        (run / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
        return {'code': 0, 'said': ''}

    monkeypatch.setattr(commands, 'command', command)
    for line in commands.repeated().values():
        assert line['two runs are equal'] is (failing not in (0, 1))
        assert line['a resume is equal'] is (failing not in (0, 2))
        assert len(line['failures']) == (failing is not None)
        assert all('exit code 1' in failure for failure in line['failures'])


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    for name, size in (('small', 10), ('large', script.MOST_BYTES + 1)):
        with (tmp_path / name).open('wb') as file:
            file.truncate(size)
    script.bound(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['small']


@pytest.mark.slow
@pytest.mark.exhaustive  # fifteen minutes on two busy cores
def test_everything_runs_to_its_end(tmp_path: Path) -> None:
    found = measure(tmp_path, '--seconds', '1500')
    assert [*found] == NAMES
    failed = {name: line for name, line in found.items() if 'failed' in line or 'skipped' in line}
    # PyTorch need not be there, and Mosaic's attention is for Hopper.
    assert {*failed} <= {'torch-1.2b-8', 'torch-llama', 'mosaic'}, failed
    for name in NAMES:
        if name.startswith('step'):
            assert found[name]['median_ms'] > 0
            # The first loss is near log 512 = 6.24; six steps on one sequence learn some of it.
            assert 5.5 < found[name]['loss'] < 6.3
    assert found['deterministic']['two starts are equal']
    assert found['deterministic']['a resume is equal']
    for line in found['repeated'].values():
        assert not isinstance(line, dict) or (
            line['two runs are equal'] and line['a resume is equal']
        )
    assert {line['code'] for line in found['newcomer']['commands'].values()} == {0}
    for name in NAMES:
        if name.startswith('rank'):
            assert found[name]['launches'] > 100
    shutil.unpack_archive(tmp_path / '124m.tar.gz', tmp_path / 'run')
    assert profile(tmp_path / 'run').steps == [1, 2]
