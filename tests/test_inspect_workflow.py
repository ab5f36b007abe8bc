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
    assert [step['with']['persist-credentials'] for step in checkouts] == [False]
    assert 'secrets.' not in FILE.read_text()


def test_no_script_contains_text_of_the_pull_request(workflow) -> None:
    """An expression in a script is executed: a branch can have a quote in its name."""
    scripts = [
        step['run'] for job in workflow['jobs'].values() for step in job['steps'] if 'run' in step
    ]
    assert len(scripts) == 4
    assert all('${{' not in script for script in scripts)


def test_each_step_is_a_config(workflow) -> None:
    steps = workflow['jobs']['inspect']['env']['STEPS'].splitlines()
    assert [load(name, keys).mesh.num_devices for name, *keys in map(str.split, steps)] == [8, 8, 8]


def script(workflow: dict[str, Any], name: str) -> str:
    steps = workflow['jobs']['inspect']['steps']
    return next(step['run'] for step in steps if step.get('name') == name)


def test_the_base_is_the_one_that_the_head_was_merged_with(workflow, tmp_path: Path) -> None:
    head = tmp_path / 'head'
    git = ['git', '-C', f'{head}', '-c', 'user.name=x', '-c', 'user.email=x@y.z']

    def run(*command: str) -> str:
        done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(text: str) -> None:
        run('commit', '--quiet', '--allow-empty', '--message', text)

    head.mkdir()
    run('init', '--quiet', '--initial-branch=main')
    commit('the base when the pull request was opened')
    run('checkout', '--quiet', '-b', 'pull')
    commit('the pull request')
    run('checkout', '--quiet', 'main')
    commit('the newest base')
    newest = run('rev-parse', 'HEAD')
    run('checkout', '--quiet', '--detach')
    run('merge', '--quiet', '--no-ff', '--message', 'merged', 'pull')
    subprocess.run(
        ['bash', '-ec', script(workflow, 'Check out the base')], cwd=tmp_path, check=True
    )
    git[2] = f'{tmp_path / "base"}'
    assert run('rev-parse', 'HEAD') == newest


def compare(workflow: dict[str, Any], folder: Path, **given: str) -> tuple[str, int]:
    """Return the text and the exit code of the script that compares the steps."""
    summary = folder / 'summary.md'
    done = subprocess.run(
        ['bash', '-e', '-c', script(workflow, 'Compare')],
        cwd=folder,
        env=os.environ | {'GITHUB_STEP_SUMMARY': f'{summary}', 'TARGET': 'cpu'} | given,
        capture_output=True,
        text=True,
        check=False,
    )
    text = summary.read_text()
    assert text == (folder / 'diff.md').read_text()
    assert text.startswith('<!-- megajax inspect-diff -->\n')
    return text, done.returncode


def install(folder: Path, side: str, program: str) -> None:
    (folder / side).mkdir()
    file = folder / f'venv-{side}/bin/megajax'
    file.parent.mkdir(parents=True)
    file.write_text(program)
    file.chmod(0o755)


def test_a_comparison_that_fails_says_why(workflow, tmp_path: Path) -> None:
    """A base of a newer megajax can write a file that the head's does not read."""
    newer = '#!/bin/sh\nfor file; do :; done\necho "{}" >"$file"\n'
    install(tmp_path, 'base', newer)
    code = 'case $2 in --diff) echo "error: write it again" >&2; exit 2; esac\n'
    install(tmp_path, 'head', newer.replace('for', f'{code}for', 1))
    text, status = compare(workflow, tmp_path, STEPS='tiny\n')
    assert 'cannot be compared:\n\n```\nerror: write it again\n```\n' in text
    assert status == 1


@pytest.mark.slow
def test_the_script_compares_each_step_and_says_which_does_not_compile(
    workflow, tmp_path: Path
) -> None:
    for side in 'base', 'head':
        install(tmp_path, side, f'#!/bin/sh\nexec {sys.executable} -m megajax "$@"\n')
    steps = f'{SMALL} mesh.model=2\ntiny mesh.model=3\n'
    text, status = compare(workflow, tmp_path, PYTHONPATH=f'{ROOT}', STEPS=steps)
    assert f'#### `{SMALL} mesh.model=2`\n\n**Same bytes**: ' in text
    assert 'The head does not compile this step:\n\n```\nerror: ' in text
    assert status == 1
