"""A run of wandb is continued by its id, never goes back, and does not stop the training."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megajax.runtime.run.log.trackers import SECONDS, WANDB_ID, WandB


class UnreachedError(Exception):
    pass


class Service(SimpleNamespace):
    """wandb with a run that has the points before `step`, and what it was asked for."""

    def __init__(self, step: int = 0, *, is_reached: bool = True):
        super().__init__(errors=SimpleNamespace(CommError=UnreachedError), Settings=dict)
        self.started, self.points, self.is_full = list[dict[str, Any]](), list[Any](), False
        self.id, self.step, self.is_reached, self.is_done = 'abc', step, is_reached, False

    def init(self, **given: Any) -> 'Service':
        self.started.append(given)
        if not self.is_reached and given.get('mode') != 'offline':
            raise UnreachedError('no route\nmore')
        return self

    def log(self, values: dict[str, float], *, step: int) -> None:
        if self.is_full:
            raise OSError('full')
        self.points.append((step, values))

    def finish(self) -> None:
        self.is_done = True


def test_a_run_is_continued_and_keeps_the_points_that_it_has(tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, 'wandb', service)
    first = WandB(tmp_path, 'project', {'a': 1})
    first.write(0, {'loss': 3.0})
    first.write(2, {'loss': 2.0})
    first.write(1, {'loss': 9.0})
    first.write(2, {'accuracy': 0.5})  # the second part of a step
    first.close()
    assert service.is_done
    assert service.points == [(0, {'loss': 3.0}), (2, {'loss': 2.0}), (2, {'accuracy': 0.5})]
    assert (tmp_path / WANDB_ID).read_text() == 'abc\n'
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
