"""What ZeRO, replicas and grids lay out differently is one run: killed on one layout, it goes on to
the bit there, and with the same state on any other. Real processes over gloo, two and four.
"""

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import HASH_STATES, children, finish, gone, hashes, losses, read_until, start, train
from support import write_run

from megajax.runtime.checkpoint.compare import parameter_differences
from megajax.runtime.checkpoint.digests import find_steps

# `test_unpadded.py` shows that each of these layouts restores what another wrote, in one process.
pytestmark = [pytest.mark.faults, pytest.mark.exhaustive]

# Without the biases of keys, whose gradients are nothing but rounding, which Adam makes as large as
# any.
CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 300, max_seq_len: 32, bias: false}
train: {steps: 24, batch_size: 24, seq_len: 32, dtype: float32, log_every: 1}
checkpoint: {every: 5}
optim: {lr: 1e-3, schedule: constant}
"""
# Two processes of three devices, four of two, four of one, and one of four; three shards pad D.
LAYOUTS = {
    'weights, padded': (2, 'mesh.data=3', 'mesh.model=2', 'optim.shard=weights'),
    'gradients, grid': (
        4, 'mesh.data=2', 'mesh.model_rows=2', 'mesh.model=2', 'mesh.sequence_parallel=true',
        'optim.shard=gradients',
    ),
    'weights, replicas': (4, 'mesh.data=4', 'mesh.replicas=2', 'optim.shard=weights'),
    'optimizer': (1, 'mesh.data=2', 'mesh.model=2', 'optim.shard=optimizer'),
}  # fmt: skip


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The undisturbed runs, made when a test first asks for one."""
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG, split='1,0,0')

    class Runs(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            name = layout.replace(', ', '_')
            processes, *settings = LAYOUTS[layout]
            train(folder, *settings, processes=processes, name=name)
            self[layout] = folder / name
            return self[layout]

    return Runs()


@pytest.fixture(scope='module')
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], None]:
    """Copies of the folder of a run that was killed on a layout."""

    @functools.cache
    def kill_one(layout: str) -> Path:
        folder = write_run(tmp_path_factory.mktemp('killed'), CONFIG, split='1,0,0')
        kill(begin(folder, layout), at=7)
        return folder

    def copy(layout: str, to: Path) -> None:
        shutil.copytree(kill_one(layout), to, dirs_exist_ok=True)

    return copy


def begin(folder: Path, layout: str) -> subprocess.Popen[str]:
    processes, *settings = LAYOUTS[layout]
    return start(folder, *settings, processes=processes, fault=HASH_STATES)


def kill(process: subprocess.Popen[str], *, at: int) -> None:
    """Kill the last process of a run in the steps after `at`."""
    read_until(process, f'step {at}/24')
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
    ['weights, padded', 'gradients, grid', 'weights, replicas'],
)
def test_a_killed_run_goes_on_to_the_bit(
    tmp_path: Path,
    straight: dict[str, Path],
    killed: Callable[[str, Path], None],
    layout: str,
) -> None:
    killed(layout, tmp_path)
    newest = find_steps(tmp_path / 'run/checkpoints')[-1]
    end(begin(tmp_path, layout))
    found = hashes(tmp_path)
    assert found[f'restored {newest}'] == found[f'saved {newest}']
    assert losses(tmp_path / 'run') == losses(straight[layout])
    differences = dict(
        parameter_differences(tmp_path / 'run/checkpoints/24', straight[layout] / 'checkpoints/24')
    )
    assert differences == dict.fromkeys(differences, 0.0)


@pytest.mark.parametrize(
    'others',
    [['weights, replicas'], ['gradients, grid', 'weights, replicas']],
)
def test_a_run_that_is_killed_on_one_layout_after_another_ends_as_the_undisturbed_one(
    tmp_path: Path,
    straight: dict[str, Path],
    killed: Callable[[str, Path], None],
    others: list[str],
) -> None:
    killed('weights, padded', tmp_path)
    for layout, at in zip(others, (12, 17), strict=False):
        kill(begin(tmp_path, layout), at=at)
    end(begin(tmp_path, 'optimizer'))
    found = hashes(tmp_path)
    restored = [name for name in found if name.startswith('restored')]
    assert len(restored) == 1 + len(others)
    for name in restored:
        assert found[name] == found[name.replace('restored', 'saved')]
    assert losses(tmp_path / 'run') == pytest.approx(losses(straight['weights, padded']), rel=1e-5)
    for name, difference in parameter_differences(
        tmp_path / 'run/checkpoints/24', straight['weights, padded'] / 'checkpoints/24'
    ):
        assert isinstance(difference, float)
        assert difference < 1e-4, name
