"""When a save is due, and since which step."""

import time

import pytest

from megajax.core.config import CheckpointConfig
from megajax.runtime.checkpoint.due import DueSave


def test_a_save_is_due_since_the_first_step_at_which_it_was_due_until_it_begins() -> None:
    due = DueSave(CheckpointConfig(every=10))
    assert [due.reach(step, is_late=False) for step in (9, 10, 11, 20)] == [None, 10, 10, 10]
    assert due.begin() == 10
    assert [due.reach(step, is_late=step == 22) for step in (21, 22, 23)] == [None, 22, 22]
    assert due.begin() == 22
    assert due.begin() is None


def test_a_save_that_fails_is_due_again_since_the_same_step_once() -> None:
    due = DueSave(CheckpointConfig(every=10))
    for _ in range(2):
        assert due.reach(10, is_late=False) == 10
        due.begin()
        assert due.fail(10)
        assert due.reach(11, is_late=False) == 10
        assert due.begin() == 10
        assert not due.fail(10)
        assert due.reach(12, is_late=False) is None


def test_a_run_that_returns_to_an_earlier_step_has_no_save_that_is_due() -> None:
    due = DueSave(CheckpointConfig(every=10))
    due.reach(10, is_late=False)
    due.begin()
    due.fail(10)
    due.forget()
    assert due.reach(11, is_late=False) is None


@pytest.mark.parametrize(('minutes', 'is_late'), [(None, False), (5, True), (6, False)])
def test_the_minutes_count_from_the_begin_of_the_last_save(
    minutes: float | None, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, now = DueSave(CheckpointConfig(minutes=minutes)), time.monotonic()
    monkeypatch.setattr(time, 'monotonic', lambda: now + 301)
    assert due.is_late == is_late
    due.begin()
    assert not due.is_late
