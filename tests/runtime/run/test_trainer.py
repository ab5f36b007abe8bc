"""The loop around a step that computes nothing: what is refused, rolled back, saved and written."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_state
from counting import CONFIG, count_tokens, make_counting_step
from runs import steps
from support import on_mesh, slow, write_run

from megajax.core.config import Config, NumericError, load
from megajax.core.train.first_step import Calibration
from megajax.core.train.scaling import are_all_finite, has_scale
from megajax.core.train.step import init_state
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.record import read_record
from megajax.runtime.data import Batches
from megajax.runtime.run import clock, compile_step, trainer
from megajax.runtime.run.evaluation import Evaluation
from megajax.runtime.run.log.metrics import MetricsWriter
from megajax.runtime.run.log.report import StepReport
from megajax.runtime.run.rollback import ROLLBACKS
from megajax.runtime.run.run import run
from megajax.runtime.run.sampler import Sampler
from megajax.runtime.run.trainer import Trainer


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in which some batches are bad, by number; it returns the numbers of those it read."""
    folder, read = write_run(tmp_path, CONFIG, split='1,0,0'), list[int]()
    whole = Batches.rows

    def start(*bad: int) -> list[int]:
        def rows(batches: Batches, number: int, first: int, last: int) -> dict[str, np.ndarray]:
            batch = whole(batches, number, first, last)
            if len(batches) > 1000:  # training has no end
                read.append(number)
                if number in bad:
                    batch['loss_mask'][0, 0] = np.nan
            return batch

        monkeypatch.setattr(Batches, 'rows', rows)
        count_tokens(monkeypatch)
        run(
            load(folder / 'small.yaml', [f'run.dir={folder}/run', 'data.split=1,0,0']), name='small'
        )
        return read

    return start


def change(folder: Path, old: str, new: str) -> None:
    """Change the config of the run, but not its data."""
    text = (folder / 'small.yaml').read_text()
    assert old in text
    (folder / 'small.yaml').write_text(text.replace(old, new))


def test_an_error_leaves_the_newest_state_on_disk_and_says_where(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(writer: MetricsWriter, step: int, **values: float) -> None:
        if step == 5:
            raise ValueError('what nobody thought of')

    monkeypatch.setattr(MetricsWriter, 'write', write)
    with pytest.raises(ValueError, match='nobody thought'):
        start()
    assert steps(tmp_path / 'run') == [4, 5]
    assert f'step 5 is saved: {tmp_path}/run/checkpoints/5' in ''.join(
        capsys.readouterr().out.split('\n')
    )


def test_an_output_that_fails_costs_no_line_of_the_metrics(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(tmp_path, 'every: 1,', 'every: 8,')

    def step(report: StepReport, number: int, values: Mapping[str, float]) -> None:
        if number == 4:
            raise OSError(28, 'No space left on device')

    monkeypatch.setattr(StepReport, 'step', step)
    with pytest.raises(OSError, match='No space'):
        start()
    lines = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [1, 2, 3, 4, 5]  # step 5 was in flight
    assert all(line['step_ms'] > 0 for line in lines)
    assert json.loads((tmp_path / 'run/summary.json').read_text())['step'] == 5
    assert steps(tmp_path / 'run') == [5]


@pytest.mark.parametrize('others', [True, False])
def test_only_a_whole_state_is_saved_and_where_all_processes_come_to_it(
    others: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Saves:
        folder, saved, left = 'run', 0, 0

        def wait(self) -> bool:
            return True

        def abandon(self) -> None:
            self.left += 1

    def made(state: Any, step: int) -> Trainer:
        one = object.__new__(Trainer)
        one.state, one.step, one._saved, one.checkpoints = (
            SimpleNamespace(step=state),
            step,
            0,
            Saves(),
        )
        one.report, one._ahead = SimpleNamespace(say=lambda _: None), None
        one._save = lambda: setattr(one.checkpoints, 'saved', one.step)
        return one

    monkeypatch.setattr(trainer, 'all_are_here', lambda *_: others)
    taken = jnp.int32(3)
    whole, behind, lost = made(jnp.int32(3), 3), made(jnp.int32(2), 3), made(taken, 3)
    taken.delete()
    for one in (whole, behind, lost):
        one.rescue()
    assert [one.checkpoints.saved for one in (whole, behind, lost)] == [3 if others else 0, 0, 0]
    assert [one.checkpoints.left for one in (whole, behind, lost)] == [0 if others else 1, 1, 1]
    assert ('step 3 is not saved: the other processes did not fail' in caplog.text) != others


@pytest.mark.slow
def test_a_run_may_be_rolled_back_any_number_of_times_that_gets_on_between(
    start: Any, tmp_path: Path
) -> None:
    bad = 1, 3, 5, 7, 9
    assert len(bad) > ROLLBACKS
    start(*bad)
    lines = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'loss' in line] == list(range(1, 9))
    assert steps(tmp_path / 'run') == [7, 8]


def test_a_run_that_gets_to_no_other_checkpoint_ends(
    start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        NumericError, match=f'rolled back {ROLLBACKS} times without reaching another'
    ):
        start(*range(4, 5 + ROLLBACKS))
    assert capsys.readouterr().out.count('is rolled back to step') == ROLLBACKS
    assert steps(tmp_path / 'run') == [3, 4]


@pytest.mark.slow
def test_in_fp8_the_batch_after_a_first_one_that_is_not_finite_gives_the_scales(
    start: Any, tmp_path: Path
) -> None:
    change(tmp_path, 'dtype: float32', 'dtype: fp8')
    change(tmp_path, ': rollback', ': skip')
    start(0)
    config = load(tmp_path / 'small.yaml')
    with on_mesh(config), Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints:
        recent = np.asarray(checkpoints.restore(8).recent)
    assert has_scale(recent).all()
    assert are_all_finite(recent)


@pytest.mark.slow
def test_in_fp8_a_rollback_to_a_state_without_scales_sets_them(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(tmp_path, 'dtype: float32', 'dtype: fp8')
    config, whole, set_before = load(tmp_path / 'small.yaml'), Calibration.scaled, list[int]()

    def scaled(calibration: Calibration, step: int, state: Any, batch: Any) -> Any:
        new = whole(calibration, step, state, batch)
        if new is not state:
            set_before.append(step)
        return new

    with on_mesh(config), Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints:
        for step in (2, 4):
            checkpoints.save(init_state(config)._replace(step=jnp.int32(step)), step)
            checkpoints.wait()
    monkeypatch.setattr(Calibration, 'scaled', scaled)
    monkeypatch.setattr(Checkpoints, 'newest_verified', lambda _: 2)  # step 4 is damaged
    start(0)
    assert set_before == [3]


def test_a_batch_that_is_refused_is_not_read_again(start: Any) -> None:
    read = start(2)
    restarted = len(read) - 1 - read[::-1].index(3)  # before, it was read ahead
    assert 2 in read[:restarted]
    assert read[restarted : restarted + 6] == list(range(3, 9))
    assert 2 not in read[restarted:]


def test_a_rollback_is_in_the_summary_on_disk_and_rewinds_the_evaluation_before_the_next_step(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(tmp_path, 'every: 1,', 'every: 4,')
    written, read_on, rewound = list[dict[str, Any]](), Trainer._read_on, list[int]()

    def read(trainer: Trainer) -> Any:
        written.append(json.loads((tmp_path / 'run/summary.json').read_text()))
        return read_on(trainer)

    monkeypatch.setattr(Trainer, '_read_on', read)
    monkeypatch.setattr(Evaluation, 'rewind', lambda _, step: rewound.append(step))
    start(6)
    assert [summary['step'] for summary in written] == rewound == [0, 4]
    assert written[1]['seconds']['lost'] > 0


def test_the_summary_is_written_between_the_steps_that_are_logged(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, 'EVERY', 0.0)
    change(tmp_path, 'log_every: 1', 'log_every: 100')
    written, save = list[int](), Trainer._save

    def read(trainer: Trainer) -> None:
        written.append(json.loads((tmp_path / 'run/summary.json').read_text())['step'])
        save(trainer)

    monkeypatch.setattr(Trainer, '_save', read)
    start()
    assert written == [*range(1, 9)]


def test_a_run_with_another_batch_size_records_the_samples_that_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level('INFO')
    count_tokens(monkeypatch)
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    expected = 0
    for steps_of_run, batch_size in ((2, 2), (3, 4), (6, 1)):
        sizes = [f'train.batch_size={batch_size}', f'train.steps={steps_of_run}']
        run(load(folder / 'small.yaml', [f'run.dir={folder}/run', *sizes]), name='small')
        expected += batch_size * (2 if batch_size == 2 else 1 if batch_size == 4 else 3)
        record = read_record(folder / f'run/checkpoints/{steps_of_run}')
        assert record.samples == expected
    assert 'step 3 begins with sample 4 of the order' in caplog.text
    assert 'step 4 begins with sample 8 of the order' in caplog.text


def test_after_a_skipped_step_the_checkpoint_that_was_due_is_saved_evaluated_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Batches.rows

    def rows(batches: Batches, number: int, first: int, last: int) -> dict[str, np.ndarray]:
        batch = whole(batches, number, first, last)
        if len(batches) > 1000 and number in (3, 4):  # the batches of steps 4 and 5
            batch['loss_mask'][0, 0] = np.nan
        return batch

    monkeypatch.setattr(Batches, 'rows', rows)
    count_tokens(monkeypatch)
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    keys = ('data.split=9,1,0', 'train.nonfinite=skip', 'train.eval_every=2', 'train.steps=12')
    keep = ('checkpoint.every=2', 'checkpoint.keep=1', 'checkpoint.keep_every=4')
    run(load(folder / 'small.yaml', [f'run.dir={folder}/run', *keys, *keep]), name='small')
    assert steps(folder / 'run') == [6, 8, 12]
    record = read_record(folder / 'run/checkpoints/6')
    assert (record.due, record.validation_loss is None) == (4, False)
    lines = [json.loads(line) for line in (folder / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'validation_loss' in line] == [0, 2, 6, 8, 10, 12]


@pytest.mark.parametrize('every', [slow(1), 8])
def test_a_sample_that_fails_loses_no_loss_and_is_not_repeated(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(sampler: Sampler, step: int, *_: Any) -> None:
        raise MemoryError(f'of the sample after {step}')

    monkeypatch.setattr(Sampler, 'sample', sample)
    count_tokens(monkeypatch)
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    keys = 'data.split=9,1,0', 'train.eval_every=4', 'train.sample_prompts=["a"]'
    config = load(
        folder / 'small.yaml', [f'run.dir={folder}/run', f'checkpoint.every={every}', *keys]
    )
    for step in (4, 8):
        with pytest.raises(MemoryError, match=f'after {step}'):
            run(config, name='small')
    lines = [json.loads(line) for line in (folder / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if 'validation_loss' in line] == [0, 4, 8]
    assert read_record(folder / 'run/checkpoints/8').validation_loss is not None


def test_a_run_that_returns_to_its_import_keeps_the_loss_of_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Batches.rows

    def rows(batches: Batches, number: int, first: int, last: int) -> dict[str, np.ndarray]:
        batch = whole(batches, number, first, last)
        if len(batches) > 1000 and number == 1:
            batch['loss_mask'][0, 0] = np.nan
        return batch

    monkeypatch.setattr(Batches, 'rows', rows)
    count_tokens(monkeypatch)
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    keys = ('data.split=9,1,0', 'train.eval_every=4', 'checkpoint.every=4')
    config = load(folder / 'small.yaml', [f'run.dir={folder}/run', *keys])
    with on_mesh(config), Checkpoints(folder / 'run/checkpoints', config) as checkpoints:
        checkpoints.save({'params': make_state(config, 0).params}, 0)
    run(config, name='small')
    lines = [json.loads(line) for line in (folder / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [line['step'] for line in lines if 'validation_loss' in line] == [0, 4, 8]


@pytest.mark.parametrize('when', ['compiling', 'in the first step'])
def test_a_run_that_is_stopped_at_its_start_says_what_it_saves_and_where(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_step = when == 'in the first step'
    dispatch = Trainer._dispatch

    def ask_in_step(trainer: Trainer, *step: Any) -> Any:
        dispatched = dispatch(trainer, *step)
        os.kill(os.getpid(), signal.SIGINT)
        return dispatched

    def ask_while_compiling(config: Config, optimizer: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return make_counting_step(config)

    if in_step:
        monkeypatch.setattr(Trainer, '_dispatch', ask_in_step)
    make = make_counting_step if in_step else ask_while_compiling
    monkeypatch.setattr(compile_step, 'make_train_step', make)
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    with pytest.raises(SystemExit):
        run(load(folder / 'small.yaml', [f'run.dir={folder}/run']), name='small')
    out, err = capfd.readouterr()
    announced = 'saving after the current step (0 done)' if in_step else 'exiting before the first'
    assert f'SIGINT: {announced}' in err
    saved = f'{folder}/run/checkpoints/1' if in_step else 'none'
    assert f'checkpoint {saved}' in ' '.join(out.split())
    assert steps(folder / 'run') == ([1] if in_step else [])
