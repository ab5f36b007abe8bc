"""The measurements of a GPU run to their end wherever they are, each whatever befalls the
others.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, load_script

from megajax.profile import profile

script = load_script('gpu')
NAMES = [one.name for one in script.MEASUREMENTS]


def measure(out: Path, *options: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, 'benchmarks/gpu.py', '--small', '--out', str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [json.loads(line) for line in (out / 'results.jsonl').read_text().splitlines()] == lines
    return {line.pop('name'): line for line in lines}


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
    }


def test_what_matters_most_comes_first_and_all_that_80_gb_hold_may_take_eighteen_minutes() -> None:
    assert NAMES[:3] == ['machine', 'products', 'step-1.2b-8']
    assert sum(one.seconds for one in script.MEASUREMENTS if one.gigabytes <= 80) < 18 * 60


def test_a_file_that_is_too_large_is_not_kept(tmp_path: Path) -> None:
    for name, size in (('small', 10), ('large', script.MOST_BYTES + 1)):
        with (tmp_path / name).open('wb') as file:
            file.truncate(size)
    script.bound(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['small']


@pytest.mark.slow
@pytest.mark.exhaustive  # ten minutes on two busy cores
def test_everything_runs_to_its_end(tmp_path: Path) -> None:
    found = measure(tmp_path, '--seconds', '570')
    assert [*found] == NAMES
    failed = {name: line for name, line in found.items() if 'failed' in line or 'skipped' in line}
    assert {*failed} <= {'torch-1.2b-8'}, failed  # PyTorch need not be there
    for name in NAMES:
        if name.startswith('step'):
            assert found[name]['median_ms'] > 0
            assert found[name]['loss'] == pytest.approx(6.2, abs=0.3)
    assert found['deterministic']['two starts are equal']
    assert found['deterministic']['a resume is equal']
    shutil.unpack_archive(tmp_path / '124m.tar.gz', tmp_path / 'run')
    assert profile(tmp_path / 'run').steps == [1, 2]
