"""Runs that are interrupted, in processes of their own: what is asked for is on disk, and going on
equals never having stopped.
"""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from runs import (
    CONFIG,
    end_here,
    finish,
    flip_a_bit,
    largest_file,
    losses,
    read_until,
    start,
    steps,
    stop,
    train_here,
)
from support import megajax, write_run

from megajax.core.config import NumericError, load
from megajax.runtime.data import Batches
from megajax.runtime.run.run import run

pytestmark = pytest.mark.faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG)


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = write_run(tmp_path_factory.mktemp('straight'), CONFIG)
    train_here(folder)
    return losses(folder / 'run')


@pytest.mark.exhaustive  # `test_stop.py` shows that all are honoured alike
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_asked_to_stop_a_run_saves_and_goes_on_as_if_it_had_not(
    folder: Path, straight: dict[int, float], number: signal.Signals
) -> None:
    process = start(folder)
    read_until(process, 'step 13/40')
    process.send_signal(number)
    code, said = finish(process)
    assert (code, f'stopped by {number.name}' in said) == (75, True), said
    stopped = max(steps(folder / 'run'))
    assert stopped >= 13
    code, said = finish(start(folder, 'run.resume=must'))
    assert (code, f'step {stopped}\n' in said) == (0, True), said
    assert losses(folder / 'run') == straight


def test_a_signal_is_honoured_in_every_phase_and_killed_a_run_goes_on(
    folder: Path, straight: dict[int, float]
) -> None:
    for phase in ('^mesh', '^data', '^compiling', '^step 10  validation', 'step 23/40'):
        code, said, _ = stop(start(folder), signal.SIGTERM, phase)
        assert code == 75, (phase, said)
    stopped = max(steps(folder / 'run'))
    assert (stopped >= 23, 'stopped by SIGTERM' in said) == (True, True), said
    process = start(folder)
    said = read_until(process, 'step 37/40')
    assert f'step {stopped}\n' in said
    process.kill()
    finish(process)
    code, said, _ = stop(
        start(folder, "train.sample_prompts=['def ']"), signal.SIGTERM, '^sampling'
    )
    assert (code, '(process died); taking over' in said) == (75, True), said
    train_here(folder)
    assert losses(folder / 'run') == straight


def test_a_time_limit_is_a_signal(folder: Path) -> None:
    limit = 'run.max_minutes=0.05'
    code, said = end_here(folder, 'train.steps=100000', 'optim.schedule=constant', limit)
    assert (code, 'stopped by run.max_minutes' in said) == (75, True), said
    (command,) = re.findall(r'; to resume, run megajax (train run\.dir=\S+)$', said, re.MULTILINE)
    step = max(steps(folder / 'run'), default=0) + 1  # the limit may end before the first step
    done = megajax(*command.split(), 'run.max_minutes=null', f'train.steps={step}', folder=folder)
    assert (done.returncode, max(steps(folder / 'run'))) == (0, step), done.stdout


FAILS = """
from megajax.runtime.run.evaluation import Evaluation
def evaluate(evaluation, step, params, evaluate=Evaluation.evaluate):
    if step == {step}:
        raise MemoryError('of the evaluation')
    return evaluate(evaluation, step, params)
Evaluation.evaluate = evaluate
"""


@pytest.mark.parametrize(
    ('step', 'overrides'),
    [
        (30, ['checkpoint.every=20']),
        pytest.param(40, [], marks=pytest.mark.exhaustive),
    ],
)
def test_an_evaluation_that_fails_costs_no_step(
    folder: Path, straight: dict[int, float], step: int, overrides: list[str]
) -> None:
    code, said = finish(start(folder, *overrides, fault=FAILS.format(step=step)))
    assert (code, f'step {step} is saved: ' in said, 'MemoryError: of the evaluation' in said) == (
        1,
        True,
        True,
    ), said
    assert max(steps(folder / 'run')) == step
    assert f'step {step}  validation' in train_here(folder, *overrides)  # it is made up for
    assert losses(folder / 'run') == straight


def test_output_that_cannot_be_encoded_ends_nothing(folder: Path) -> None:
    code, said = finish(
        start(
            folder,
            "train.sample_prompts=['é ☃']",
            'train.steps=2',
            'optim.schedule=constant',
            PYTHONIOENCODING='ascii',
        )
    )
    assert code == 0, said
    assert r"sample after '\xe9 \u2603'" in said


def test_of_two_runs_in_one_directory_the_second_is_refused(folder: Path) -> None:
    first = start(folder, 'train.steps=100000', 'optim.schedule=constant')
    read_until(first, 'step 1/')
    code, said = end_here(folder)
    assert (code, f'is locked by pid {first.pid} on host' in said) == (2, True), said
    first.terminate()
    assert finish(first)[0] == 75


def test_without_a_sound_checkpoint_a_run_does_not_start_afresh(folder: Path) -> None:
    train_here(folder, 'train.steps=2', 'optim.schedule=constant')
    largest = largest_file(folder / 'run', 2)
    flip_a_bit(largest)
    code, said = end_here(folder)
    assert (code, largest.name in said) == (4, True), said


@pytest.mark.parametrize(
    ('policy', 'message'),
    [('stop', 'train.nonfinite=stop'), ('skip', 'as in the 2 steps before it')],
)
def test_numbers_that_stay_bad_end_the_run(folder: Path, policy: str, message: str) -> None:
    code, said = end_here(
        folder, 'optim.lr=1e38', 'checkpoint.every=1', f'train.nonfinite={policy}'
    )
    assert (code, message in said) == (3, True), said
    train_here(folder, 'train.steps=1', 'optim.schedule=constant')
    assert (
        None not in losses(folder / 'run').values()
    )  # what was saved is finite, and what came after it is gone


def test_rolled_back_a_run_goes_on_with_the_batches_after_the_bad_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    whole = Batches.rows

    def rows(batches: Batches, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        batch = whole(batches, step, start, stop)
        if len(batches) > 1000:  # training has no end
            read.append(step)
            if step == 13:
                batch['loss_mask'][0, 0] = np.nan
        return batch

    monkeypatch.setattr(Batches, 'rows', rows)
    overrides = [f'run.dir={folder}/run', 'train.nonfinite=rollback', 'train.sample_prompts=[]']
    run(load(folder / 'small.yaml', overrides), name='small')
    found = losses(folder / 'run')
    assert sorted(found) == list(range(1, 41))
    assert None not in found.values()
    assert read.index(14) > read.index(13)
    again = read[len(read) - read[::-1].index(14) - 1 :] if read.count(14) > 1 else []
    assert again[:30] == list(range(14, 44))
    with pytest.raises(NumericError, match='there is no checkpoint yet'):
        run(
            load(
                folder / 'small.yaml', [f'run.dir={folder}/other', *overrides[1:], 'optim.lr=1e38']
            ),
            name='small',
        )
