"""A run directory is read as far as it is there, and a mistake in its name is explained."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.analysis.report.read import RunData, read_runs
from megajax.core.config import ConfigError
from megajax.runtime.run.saved_step import RECORD


def read(folder: Path) -> RunData:
    (run,) = read_runs([folder])
    return run


def test_a_finished_run_has_all_its_steps_evaluations_checkpoints_and_samples(
    finished_run: Path,
) -> None:
    run = read(finished_run)
    assert list(run.steps.number) == [1, 2, 3, 4, 5, 6]
    assert np.isfinite(run.steps['loss']).all()
    assert list(run.evaluated('validation_loss')[0]) == [0, 3, 6]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [3, 6]
    assert not any(checkpoint.fault for checkpoint in run.checkpoints)
    assert [line['step'] for line in run.samples] == [3]
    assert run.summary['starts'] == 2
    assert run.is_finished
    assert run.running is None


def test_a_line_that_is_being_written_is_left_out(copied_run: Path) -> None:
    with (copied_run / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 7, "loss": 3.')
    assert read(copied_run).last_step == 6


@pytest.mark.parametrize('line', [f'{{"step": 1{400 * "0"}, "loss": 3}}', '[' * 100_000])
def test_a_line_that_no_run_writes_is_left_out(copied_run: Path, line: str) -> None:
    with (copied_run / 'metrics.jsonl').open('a') as file:
        file.write(f'{line}\n{{"step": 7, "loss": 1{400 * "0"}}}\n')
    run = read(copied_run)
    assert run.last_step == 7
    assert np.isnan(run.steps['loss'][-1])


def test_a_value_that_only_some_steps_have_is_not_a_number_in_the_others(tmp_path: Path) -> None:
    (tmp_path / 'config.yaml').write_text(
        'model: {num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 64, max_seq_len: 1024}'
    )
    lines = [
        {'step': 1, 'loss': 1.0},
        {'step': 2, 'loss': None, 'mfu': 0.5},
        {'step': 3, 'loss': 2},
    ]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    steps = read(tmp_path).steps
    assert np.array_equal(steps['loss'], [1, np.nan, 2], equal_nan=True)
    assert np.array_equal(steps['mfu'], [np.nan, 0.5, np.nan], equal_nan=True)
    assert np.isnan(steps['memory_bytes']).all()
    assert steps.median('memory_bytes') is None


HOLD = """
import sys, time
from pathlib import Path
from megajax.runtime.run.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print('held', flush=True)
    time.sleep(60)
"""


def test_only_a_living_process_counts_as_running(copied_run: Path) -> None:
    command = [sys.executable, '-c', HOLD, str(copied_run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == 'held\n'
        assert f'pid {holder.pid} ' in (read(copied_run).running or '')
        holder.kill()
        holder.wait()
    assert (copied_run / 'lock').read_text()  # it still names the process that was killed
    assert read(copied_run).running is None


def test_a_damaged_step_is_a_sentence_and_no_error(copied_run: Path) -> None:
    (copied_run / RECORD).write_text('{')
    run = read(copied_run)
    assert run.kept is None
    assert 'the compiled step cannot be read' in run.unreadable[0]


def test_each_name_without_a_run_is_named_with_a_guess(finished_run: Path) -> None:
    missing, empty = finished_run.parent / 'rum', finished_run.parent / 'corpus'
    with pytest.raises(ConfigError) as raised:
        read_runs([missing, empty])
    first, second = str(raised.value).splitlines()
    assert (
        f'{missing} is not a run directory (no config.yaml): did you mean {finished_run}?' in first
    )
    assert f'{empty} is not a run directory' in second


def test_of_a_pattern_only_the_runs_are_read(
    finished_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (failed := tmp_path / 'failed').mkdir()
    (notes := tmp_path / 'notes.txt').touch()
    assert [run.folder for run in read_runs([failed, finished_run, notes])] == [finished_run]
    assert [record.getMessage() for record in caplog.records] == [
        f'{path} is left out: it is not a run directory (no config.yaml)'
        for path in (failed, notes)
    ]
    with pytest.raises(ConfigError, match='missing is not a run directory'):
        read_runs([finished_run, tmp_path / 'missing'])
    with pytest.raises(ConfigError, match='give the runs in it'):
        read_runs([finished_run, finished_run.parent])


def test_a_run_that_is_given_twice_is_refused(finished_run: Path) -> None:
    with pytest.raises(ConfigError, match='is given twice: remove one'):
        read_runs([finished_run, finished_run / '..' / finished_run.name])


def test_runs_of_one_name_are_told_apart_by_their_paths(copied_run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(copied_run, tmp_path / 'other' / copied_run.name))
    names = [run.name for run in read_runs([copied_run, other])]
    assert names == [str(copied_run), str(other)]


def test_a_folder_that_cannot_be_listed_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='is not a run directory'):
        read_runs([tmp_path / 'no' / 'such' / f'run{os.sep}'])
