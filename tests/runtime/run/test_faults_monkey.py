"""Runs that are killed at random moments end as undisturbed ones do, and where one does not it is
noticed.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import train_here
from support import load_script, write_run

monkey = load_script('monkey', 'tests/runtime/run')
pytestmark = pytest.mark.faults

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_heads: 1, vocab_size: 300, max_seq_len: 16}
train: {steps: 3, batch_size: 2, seq_len: 16, dtype: float32, eval_every: 10, eval_batches: 1}
"""


@pytest.mark.exhaustive  # each kind of kill has a test of its own
@pytest.mark.parametrize(
    'options',
    [
        ['--kills', kills, '--processes', processes, '--meshes', meshes]
        for kills, processes, meshes in (
            ('8', '1', 'fixed'),
            ('24', '1', 'fixed'),
            ('8', '2', 'fixed'),
            ('8', '2', 'changing'),
        )
    ],
    ids=lambda options: f'{options[1]} kills, {options[3]} processes, {options[5]} meshes',
)
def test_killed_at_random_moments_a_run_ends_in_the_state_of_an_undisturbed_one(
    options: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, str(Path(__file__).with_name('monkey.py')), *options]
    environ = os.environ | {
        'PYTHONPATH': os.pathsep.join(
            filter(None, (str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')))
        )
    }
    done = subprocess.run(
        [*command, '--out', str(tmp_path / 'out.json')],
        env=environ,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'the losses of all steps: equal' in done.stdout
    record = json.loads((tmp_path / 'out.json').read_text())
    assert record['kills'] == len(record['rows']) == int(options[1])


def test_another_loss_a_missing_step_and_another_state_are_noticed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, CONFIG)
    train_here(folder, name='straight')
    shutil.copytree(folder / 'straight', folder / 'same')
    assert monkey.differences(folder / 'straight', folder / 'same') == {'loss': 0.0, 'weight': 0.0}
    train_here(folder, 'optim.lr=1e-3', name='other')
    lines = (folder / 'straight/metrics.jsonl').read_text()
    (folder / 'other/metrics.jsonl').write_text(lines)
    found = monkey.differences(folder / 'straight', folder / 'other')
    assert found['loss'] == 0
    assert found['weight'] > monkey.MAX_APART['weight']
    changed = [json.loads(line) for line in lines.splitlines()]
    step = next(line for line in changed if line.get('loss'))
    step['loss'] *= 1.0001
    (folder / 'same/metrics.jsonl').write_text('\n'.join(map(json.dumps, changed)))
    assert (
        monkey.differences(folder / 'straight', folder / 'same')['loss'] > monkey.MAX_APART['loss']
    )
    changed.remove(step)
    (folder / 'same/metrics.jsonl').write_text('\n'.join(map(json.dumps, changed)))
    with pytest.raises(AssertionError, match='a step is missing'):
        monkey.differences(folder / 'straight', folder / 'same')
