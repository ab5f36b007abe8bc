"""The place of Megatron-LM's run in its data is read from its checkpoint and kept by the import."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from megajax.interop.megatron import dist_checkpoint
from megajax.interop.megatron.rank_files import Progress, progress_of
from megajax.interop.megatron.ranks import ITERATION, import_megatron
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.run.resumed_data import imported

STORED = Path(__file__).parent / 'torch_dist/gpt2.tar.xz'


@pytest.mark.parametrize(
    ('contents', 'expected'),
    [
        (
            {'iteration': 5, 'args': {'consumed_train_samples': 40, 'train_samples': 320}},
            Progress(5, 40, 320),
        ),
        (
            {
                'iteration': 5,
                'args': {'consumed_train_samples': 40, 'train_iters': 10, 'global_batch_size': 8},
            },
            Progress(5, 40, 80),
        ),
        ({'iteration': 5, 'args': {'consumed_train_samples': 'x'}}, Progress(5, None, None)),
        ({'iteration': -1}, Progress(None, None, None)),
    ],
)
def test_the_progress_of_a_checkpoint(contents: dict[str, Any], expected: Progress) -> None:
    assert progress_of(contents) == expected


def test_an_import_keeps_the_iteration_and_the_consumed_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.unpack_archive(STORED, tmp_path / 'theirs', filter='data')
    monkeypatch.setattr(dist_checkpoint, 'progress_of', lambda _: Progress(5, 40, 80))
    import_megatron(tmp_path / 'theirs', tmp_path / 'run', ['train.dtype=float32'])
    record = read_record(tmp_path / 'run/checkpoints/0')
    assert (record.data[ITERATION], record.samples, record.order_of) == ('5', 40, 80)
    assert imported(tmp_path / 'run/checkpoints/0') == record


def test_a_fine_tuning_run_begins_with_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.unpack_archive(STORED, tmp_path / 'theirs', filter='data')
    monkeypatch.setattr(dist_checkpoint, 'progress_of', lambda _: Progress(5, 40, 80))
    import_megatron(tmp_path / 'theirs', tmp_path / 'run', ['train.dtype=float32'], finetune=True)
    record = read_record(tmp_path / 'run/checkpoints/0')
    assert (record.data[ITERATION], record.samples, record.order_of) == ('5', None, None)
    assert imported(tmp_path / 'run/checkpoints/0') is None
