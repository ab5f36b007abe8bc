"""A run of wandb is continued by its id, never goes back, and does not stop the training."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import make_config

from megajax.core.config import NumericError, StopRequested
from megajax.runtime.run.log.metrics import MetricsWriter
from megajax.runtime.run.log.trackers import SECONDS, WANDB_ID, WandB

CONFIG = make_config(run={'wandb': 'mine'})


class UnreachedError(Exception):
    pass


class Service(SimpleNamespace):
    """wandb with a run that has the points before `step`, and what it was asked for."""

    def __init__(self, step: int = 0, *, is_reached: bool = True):
        super().__init__(errors=SimpleNamespace(CommError=UnreachedError), Settings=dict)
        self.started, self.points, self.is_full = list[dict[str, Any]](), list[Any](), False
        self.id, self.step, self.is_reached, self.ended = 'abc', step, is_reached, list[Any]()

    def init(self, **given: Any) -> 'Service':
        self.started.append(given)
        if not self.is_reached and given.get('mode') != 'offline':
            raise UnreachedError('no route\nmore')
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        if self.is_full:
            raise OSError('full')
        self.points.append((step, values))

    def mark_preempting(self) -> None:
        self.ended.append('preempting')

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


def test_a_run_is_continued_and_keeps_the_points_that_it_has(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, 'wandb', service)
    first = WandB(tmp_path, 'project', {'a': 1})
    first.write(0, {'loss': 3.0})
    first.write(2, {'loss': 2.0})
    first.write(1, {'loss': 9.0})
    first.write(2, {'accuracy': 0.5})  # the second part of a step
    first.close()
    assert service.ended == [0]
    assert service.points == [(0, {'loss': 3.0}), (2, {'loss': 2.0}), (2, {'accuracy': 0.5})]
    assert (tmp_path / WANDB_ID).read_text() == f'abc\n{tmp_path}\n'
    service.step = 3
    WandB(tmp_path, 'project', {}).write(2, {'loss': 9.0})
    assert len(service.points) == 3
    asked = [(one['project'], one['id'], one['resume']) for one in service.started]
    assert asked == [('project', None, 'allow'), ('project', 'abc', 'allow')]
    # Nothing that may hold a secret is sent, and nothing waits for long.
    settings = service.started[0]['settings']
    assert settings['console'] == 'off'
    assert settings['disable_git'] is settings['disable_code'] is True
    assert settings['init_timeout'] == settings['finish_timeout'] == SECONDS


def test_an_evaluation_that_a_resume_repeats_is_a_point(tmp_path, monkeypatch):
    service = Service(step=3)  # the points of steps 0 to 2
    monkeypatch.setitem(sys.modules, 'wandb', service)
    tracker = WandB(tmp_path, 'project', {})
    tracker.write(1, {'validation_loss': 9.0})  # a resume from an older step
    tracker.write(2, {'validation_loss': 1.0})
    tracker.write(3, {'loss': 2.0})
    assert service.points == [(3, {'validation_loss': 1.0}), (3, {'loss': 2.0})]


def test_a_run_that_goes_back_says_what_wandb_does_not_show(tmp_path, monkeypatch, caplog):
    service = Service(step=3)
    monkeypatch.setitem(sys.modules, 'wandb', service)
    with MetricsWriter(tmp_path, 2, config=CONFIG) as writer:
        for step in range(3, 10):
            writer.write(step, loss=1.0)
        assert not caplog.records
        writer.rewind(5)
        for step in range(6, 11):
            writer.write(step, loss=2.0)
    assert [step for step, values in service.points if values['loss'] == 2] == [9, 10]
    service.step = 11
    with MetricsWriter(tmp_path, 8, config=CONFIG):
        pass
    gone = [message.partition(':')[0] for message in caplog.messages]
    assert gone == [f'wandb cannot go back to step {step}' for step in (5, 8)]
    assert ['no new ones before step 9;' in text for text in caplog.messages] == [True, False]


def test_a_copy_begins_a_run_of_its_own_and_a_moved_folder_does_not(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, 'wandb', service)

    def continued(folder: Path, new_id: str) -> str | None:
        """The id with which a start in the folder asks for its run."""
        service.id = new_id
        WandB(folder, 'project', {}).close()
        return service.started[-1]['id']

    (first := tmp_path / 'first').mkdir()
    (first / WANDB_ID).write_text('old\n')  # as an earlier version wrote it
    assert continued(first, 'old') == 'old'
    copy = Path(shutil.copytree(first, tmp_path / 'copy'))
    assert continued(copy, 'new') is None
    assert continued(copy, 'new') == 'new'
    assert continued(first, 'old') == 'old'
    moved = first.rename(tmp_path / 'moved')
    (tmp_path / 'link').symlink_to(moved)
    assert continued(tmp_path / 'link', 'old') == 'old'
    assert continued(moved, 'old') == 'old'
    first.mkdir()
    assert continued(first, 'other') is None  # a new run in the old place
    (moved / WANDB_ID).write_text(f'old\n{first}\n')
    assert continued(moved, 'old') == 'old'


def test_without_the_service_the_data_are_kept(tmp_path, monkeypatch, caplog):
    service = Service(is_reached=False)
    monkeypatch.setitem(sys.modules, 'wandb', service)
    WandB(tmp_path, 'project', {}).write(0, {'loss': 3.0})
    assert [one.get('mode') for one in service.started] == [None, 'offline']
    assert service.points == [(0, {'loss': 3.0})]
    assert f'(no route): send the data later with wandb sync {tmp_path}/wandb' in caplog.text


def test_after_a_failure_nothing_more_is_written(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, 'wandb', service)
    tracker = WandB(tmp_path, 'project', {})
    service.is_full = True
    with pytest.raises(OSError, match='full'):
        tracker.write(0, {'loss': 3.0})
    service.is_full = False
    tracker.write(1, {'loss': 3.0})
    assert service.points == []


@pytest.mark.parametrize(
    ('error', 'ended'),
    [
        (None, [0]),
        (NumericError('nan'), [NumericError.exit_code]),
        (ValueError('what nobody thought of'), [1]),
        (KeyboardInterrupt(), [1]),
        (StopRequested('SIGTERM'), ['preempting', StopRequested.exit_code]),
    ],
)
def test_the_end_of_a_run_is_told_as_it_was(error, ended, tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, 'wandb', service)
    with suppress(BaseException), MetricsWriter(tmp_path, 0, config=CONFIG):
        if error:
            raise error
    assert service.ended == ended
