"""A save that fails is one line, whoever else has something to say of it."""

import gc
import logging
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import make_state, tiny
from support import disk_full_at, on_mesh

from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.log_filters import leave_failed_saves_to_us
from megajax.runtime.checkpoint.step_folders import StepFolders
from megajax.runtime.processes.consensus import FAILED_ELSEWHERE


@pytest.mark.filterwarnings('ignore:Error writing persistent compilation cache')
def test_a_save_that_fails_is_one_line_and_the_next_one_does_not_fail_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny()
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        state = make_state(config, 1)
        with disk_full_at(2000):
            checkpoints.save(state, 1)
            assert not checkpoints.wait()
        gc.collect()
        said = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert len(said) == 1, said
        assert said[0].startswith('checkpoint 1 could not be written (')
        assert 'Traceback' not in capfd.readouterr().err
        checkpoints.save(make_state(config, 2), 2)
        assert checkpoints.wait()
        assert checkpoints.newest_verified() == 2


def test_a_save_that_fails_is_tried_again_at_once_and_then_when_it_is_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(checkpoint={'every': 100})
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        due = []
        for step in (1, 2, 3):
            with disk_full_at(2000):
                checkpoints.save(make_state(config, step), step)
                assert not checkpoints.wait()
            due.append(checkpoints.poll(step + 1))
        checkpoints.save(make_state(config, 4), 4)
        assert checkpoints.wait()
        assert due == [1, None, 3]
        assert [
            record.getMessage().rpartition('; ')[2]
            for record in caplog.records
            if record.levelno >= logging.WARNING
        ] == [
            'trying again',
            'the next save is tried when it is due',
            'trying again',
        ]


@pytest.mark.parametrize(
    ('process', 'error', 'told'),
    [
        (0, None, [FAILED_ELSEWHERE]),
        (1, None, []),
        (1, RuntimeError(FAILED_ELSEWHERE), []),
        (1, OSError('No space left'), ['No space left']),
    ],
)
def test_of_many_processes_the_first_tells_of_a_failed_save_and_those_that_know_why(
    process: int,
    error: Exception | None,
    told: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny()
    with on_mesh(config), Checkpoints(tmp_path / 'checkpoints', config) as checkpoints:
        with monkeypatch.context() as of_several:
            of_several.setattr(jax, 'process_index', lambda: process)
            of_several.setattr(
                'megajax.runtime.checkpoint.checkpoints.from_all', lambda *_: np.array([[True]])
            )
            of_several.setattr(StepFolders, 'write_error', lambda _: error)
            checkpoints.save(make_state(config, 1), 1)
        assert not checkpoints.wait()
        checkpoints.close()
    assert [record.getMessage() for record in caplog.records] == [
        f'checkpoint 1 could not be written ({why}); trying again' for why in told
    ]


def test_what_is_not_of_a_save_is_told_as_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(
        sys, 'unraisablehook', lambda unraisable: heard.append(str(unraisable.exc_value))
    )
    for _ in range(2):
        leave_failed_saves_to_us()
    for name in ('absl', 'asyncio'):
        logging.getLogger(name).error('of another library')
    for path, message in (('/x/orbax/y.py', 'a'), ('/x.py', 'its exception was never retrieved')):
        record = logging.LogRecord('absl', logging.ERROR, path, 1, message, None, None)
        logging.getLogger('absl').handle(record)
        record.levelno = logging.WARNING
        assert logging.getLogger('absl').filter(record)
    for error in ('Event loop is closed', 'of another object'):
        raise_in_a_destructor(RuntimeError(error))
    assert [record.getMessage() for record in caplog.records] == ['of another library'] * 2
    assert heard == ['of another object']


def raise_in_a_destructor(error: Exception) -> None:
    class Broken:
        def __del__(self) -> None:
            raise error

    Broken()
