"""The stages of a pipeline, and shards of sequences, on several processes are one run: killed in
the middle of a schedule it goes on to the bit, and with the same state on other stages. Real
processes over gloo, two and four.
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

pytestmark = pytest.mark.faults

# Without the biases of keys, whose gradients are nothing but rounding, which Adam makes as large as
# any.
CONFIG = """
model: {num_layers: 4, hidden_size: 32, num_heads: 4, vocab_size: 300, max_seq_len: 32, \
bias: false, dropout: 0}
train: {steps: 24, batch_size: 8, microbatches: 4, seq_len: 32, dtype: float32, log_every: 1}
checkpoint: {every: 5}
optim: {lr: 1e-3, schedule: constant}
"""
# Processes have different stages of a pipeline; where there is no pipeline, data shards.
LAYOUTS = {
    'two stages of two chunks': (
        2, 'mesh.stages=2', 'mesh.virtual_stages=2', 'mesh.model=2', 'mesh.sequence_parallel=true',
    ),
    'four stages': (4, 'mesh.stages=4', 'optim.shard=optimizer'),
    'two stages and two shards of a sequence': (
        2, 'mesh.stages=2', 'mesh.context=2', 'mesh.context_exchange=ring', 'train.schedule=gpipe',
    ),
    'no stages': (1, 'mesh.data=2'),
}  # fmt: skip


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The undisturbed runs, made when a test first asks for one."""
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG, split='1,0,0')

    class Runs(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            name = layout.replace(' ', '_')
            processes, *settings = LAYOUTS[layout]
            train(folder, *settings, processes=processes, name=name)
            self[layout] = folder / name
            return self[layout]

    return Runs()


@pytest.fixture(scope='module')
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], str]:
    """Copies of the folder of a run that was killed on a layout, and what it said."""

    @functools.cache
    def kill_one(layout: str) -> tuple[Path, str]:
        folder = write_run(tmp_path_factory.mktemp('killed'), CONFIG, split='1,0,0')
        return folder, kill(begin(folder, layout), at=7)

    def copy(layout: str, to: Path) -> str:
        folder, said = kill_one(layout)
        shutil.copytree(folder, to, dirs_exist_ok=True)
        return said

    return copy


def begin(folder: Path, layout: str) -> subprocess.Popen[str]:
    processes, *settings = LAYOUTS[layout]
    return start(folder, *settings, processes=processes, fault=HASH_STATES)


def kill(process: subprocess.Popen[str], *, at: int) -> str:
    """Kill the last process of a run, a stage, in the steps after `at`; return what is said."""
    said = read_until(process, f'step {at}/24')
    pids = children(process)
    os.kill(pids[-1], signal.SIGKILL)
    code, rest = finish(process)
    assert code == 75, rest
    assert all(gone(pid) for pid in pids)
    return said + rest


def end(process: subprocess.Popen[str]) -> str:
    code, said = finish(process)
    assert code == 0, said
    return said


@pytest.mark.parametrize(
    'layout',
    ['two stages of two chunks', pytest.param('four stages', marks=pytest.mark.exhaustive)],
)
def test_a_pipeline_that_loses_a_stage_goes_on_to_the_bit(
    tmp_path: Path,
    straight: dict[str, Path],
    killed: Callable[[str, Path], str],
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
    ('others', 'stages'),
    [
        (['two stages and two shards of a sequence'], '2 -> 1'),
        pytest.param(
            ['four stages', 'two stages and two shards of a sequence'],
            '2 -> 4',
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_run_that_is_killed_with_other_stages_each_time_ends_as_the_undisturbed_one(
    tmp_path: Path,
    straight: dict[str, Path],
    killed: Callable[[str, Path], str],
    others: list[str],
    stages: str,
) -> None:
    said = killed('two stages of two chunks', tmp_path)
    for layout, at in zip(others, (12, 17), strict=False):
        said += kill(begin(tmp_path, layout), at=at)
    said += end(begin(tmp_path, 'no stages'))
    for words in (
        'bubble 12.5% of the busy time',
        f'resume     mesh.stages: {stages}',
        'resume     mesh.virtual_stages: 2 -> 1',
        'resume     mesh.context: 1 -> 2',
        'resume     train.schedule: 1f1b -> gpipe',
    ):
        assert words in said
    found = hashes(tmp_path)
    restored = [name for name in found if name.startswith('restored')]
    assert len(restored) == 1 + len(others)
    for name in restored:
        assert found[name] == found[name.replace('restored', 'saved')]
    assert losses(tmp_path / 'run') == pytest.approx(losses(straight['no stages']), rel=1e-5)
    for name, difference in parameter_differences(
        tmp_path / 'run/checkpoints/24', straight['no stages'] / 'checkpoints/24'
    ):
        assert isinstance(difference, float)
        assert difference < 1e-4, name
