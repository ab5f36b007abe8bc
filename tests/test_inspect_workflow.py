"""The workflow that comments on a pull request: what may write, and what its script reports."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megajax.core.config import load

ROOT = Path(__file__).parents[1]
FILE = ROOT / '.github/workflows/inspect-diff.yml'
SMALL = 'tiny model.num_layers=1 model.vocab_size=300 train.batch_size=8 mesh.data=1'


@pytest.fixture(scope='module')
def workflow() -> dict[str, Any]:
    return YAML(typ='safe').load(FILE)


def test_code_of_a_pull_request_runs_with_a_token_that_only_reads(workflow) -> None:
    assert list(workflow['on']) == ['pull_request']
    assert workflow['permissions'] == {}
    inspect, comment = workflow['jobs']['inspect'], workflow['jobs']['comment']
    assert inspect['permissions'] == {'contents': 'read'}
    assert comment['permissions'] == {'pull-requests': 'write'}
    assert all('checkout' not in step.get('uses', '') for step in comment['steps'])
    assert 'head.repo.full_name == github.repository' in comment['if']
    checkouts = [step for step in inspect['steps'] if 'checkout' in step.get('uses', '')]
    assert [step['with']['persist-credentials'] for step in checkouts] == [False, False]
    assert 'secrets.' not in FILE.read_text()


def test_no_script_contains_text_of_the_pull_request(workflow) -> None:
    """An expression in a script is executed: a branch can have a quote in its name."""
    scripts = [
        step['run'] for job in workflow['jobs'].values() for step in job['steps'] if 'run' in step
    ]
    assert len(scripts) == 3
    assert all('${{' not in script for script in scripts)


def test_each_step_is_a_config(workflow) -> None:
    steps = workflow['jobs']['inspect']['env']['STEPS'].splitlines()
    assert [load(name, keys).mesh.num_devices for name, *keys in map(str.split, steps)] == [8, 8, 8]


@pytest.mark.slow
def test_the_script_compares_each_step_and_says_which_does_not_compile(
    workflow, tmp_path: Path
) -> None:
    for side in 'base', 'head':
        (tmp_path / side).mkdir()
        program = tmp_path / f'venv-{side}/bin/megajax'
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m megajax "$@"\n')
        program.chmod(0o755)
    script = next(
        step['run']
        for step in workflow['jobs']['inspect']['steps']
        if step.get('name') == 'Compare'
    )
    summary = tmp_path / 'summary.md'
    given = {'GITHUB_STEP_SUMMARY': f'{summary}', 'PYTHONPATH': f'{ROOT}', 'TARGET': 'cpu'}
    steps = {'STEPS': f'{SMALL} mesh.model=2\ntiny mesh.model=3\n'}
    done = subprocess.run(
        ['bash', '-e', '-c', script],
        cwd=tmp_path,
        env=os.environ | given | steps,
        capture_output=True,
        text=True,
        check=False,
    )
    text = summary.read_text()
    assert text == (tmp_path / 'diff.md').read_text()
    assert text.startswith('<!-- megajax inspect-diff -->\n')
    assert f'#### `{SMALL} mesh.model=2`\n\n**Same bytes**: ' in text
    assert 'The head does not compile this step:\n\n```\nerror: ' in text
    assert done.returncode == 1, done.stderr
