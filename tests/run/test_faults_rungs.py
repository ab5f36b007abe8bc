"""What ZeRO, replicas and grids lay out differently is one run: killed on one layout, it goes on to
the bit there, and with the same state on any other. Real processes over gloo, two and four.
"""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from runs import HASH_STATES, children, finish, gone, hashes, losses, read_until, start, train
from support import write_run

from megajax.checkpoint.compare import parameter_differences
from megajax.checkpoint.digests import find_steps

pytestmark = pytest.mark.faults

# Without the biases of keys, whose gradients are nothing but rounding, which Adam makes as large as
# any.
CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 300, max_seq_len: 32, bias: false}
train: {steps: 30, batch_size: 24, seq_len: 32, dtype: float32, eval_every: 100, log_every: 1}
checkpoint: {every: 5}
optim: {lr: 1e-3, schedule: constant}
"""
# Two processes of three devices, four of two, and four of one; three data shards pad D.
LAYOUTS = {
    'weights, padded': (2, 'mesh.data=3', 'mesh.model=2', 'optim.shard=weights'),
    'gradients, grid': (
        4, 'mesh.data=2', 'mesh.model_rows=2', 'mesh.model=2', 'mesh.sequence_parallel=true',
        'optim.shard=gradients',
    ),
    'weights, replicas': (4, 'mesh.data=4', 'mesh.replicas=2', 'optim.shard=weights'),
    'optimizer': (2, 'mesh.data=2', 'mesh.model=2', 'optim.shard=optimizer'),
}  # fmt: skip


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The undisturbed runs, made when a test first asks for one."""
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG)

    class Runs(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            name = layout.replace(', ', '_')
            processes, *settings = LAYOUTS[layout]
            train(folder, *settings, processes=processes, name=name)
            self[layout] = folder / name
            return self[layout]

    return Runs()


def begin(folder: Path, layout: str) -> subprocess.Popen[str]:
    processes, *settings = LAYOUTS[layout]
    return start(folder, *settings, processes=processes, fault=HASH_STATES)


def kill(process: subprocess.Popen[str], *, at: int) -> None:
    """Kill the last process of a run in the steps after `at`."""
    read_until(process, f'step {at}/30')
    pids = children(process)
    os.kill(pids[-1], signal.SIGKILL)
    code, said = finish(process)
    assert code == 75, said
    assert all(gone(pid) for pid in pids)


def end(process: subprocess.Popen[str]) -> None:
    code, said = finish(process)
    assert code == 0, said


@pytest.mark.parametrize(
    'layout',
    [
        'weights, padded',
        *(
            pytest.param(layout, marks=pytest.mark.exhaustive)
            for layout in ('gradients, grid', 'weights, replicas')
        ),
    ],
)
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path: Path, straight: dict[str, Path], layout: str
) -> None:
    folder = write_run(tmp_path, CONFIG)
    kill(begin(folder, layout), at=7)
    newest = find_steps(folder / 'run/checkpoints')[-1]
    end(begin(folder, layout))
    found = hashes(folder)
    assert found[f'restored {newest}'] == found[f'saved {newest}']
    assert losses(folder / 'run') == losses(straight[layout])
    differences = dict(
        parameter_differences(folder / 'run/checkpoints/30', straight[layout] / 'checkpoints/30')
    )
    assert differences == dict.fromkeys(differences, 0.0)


def test_a_run_that_is_killed_on_one_layout_after_another_ends_as_the_undisturbed_one(
    tmp_path: Path, straight: dict[str, Path]
) -> None:
    folder = write_run(tmp_path, CONFIG)
    for layout, at in [('weights, padded', 7), ('gradients, grid', 12), ('weights, replicas', 17)]:
        kill(begin(folder, layout), at=at)
    end(begin(folder, 'optimizer'))
    found = hashes(folder)
    restored = [name for name in found if name.startswith('restored')]
    assert len(restored) == 3
    for name in restored:
        assert found[name] == found[name.replace('restored', 'saved')]
    assert losses(folder / 'run') == pytest.approx(losses(straight['weights, padded']), rel=1e-5)
    for name, difference in parameter_differences(
        folder / 'run/checkpoints/30', straight['weights, padded'] / 'checkpoints/30'
    ):
        assert isinstance(difference, float)
        assert difference < 1e-4, name
