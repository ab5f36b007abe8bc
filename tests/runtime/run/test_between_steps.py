"""The seconds between the steps, and whose they are."""

import time

import pytest

from megajax.runtime.run import between_steps
from megajax.runtime.run.between_steps import BetweenSteps
from megajax.runtime.run.clock import Clock


def test_the_answers_of_the_others_come_with_the_step_in_flight_which_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = []

    def slowest(seconds: float) -> dict[str, float]:
        own.append(seconds)
        time.sleep(0.1)
        return {}

    monkeypatch.setattr(between_steps, 'slowest', slowest)
    clock = Clock()
    clock.begin('other')
    between = BetweenSteps(clock)
    between.begin()
    for _ in range(2):
        between.checkpoint_ms()
        between.find_slowest()
    assert clock.seconds('productive') >= 0.2
    assert clock.seconds('other') < 0.1
    assert max(own) < 0.1


def test_the_seconds_are_those_of_a_step_also_where_a_resume_leaves_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = []

    def slowest(seconds: float) -> dict[str, float]:
        own.append(seconds)
        return {}

    monkeypatch.setattr(between_steps, 'slowest', slowest)
    clock = Clock()
    clock.begin('other')
    between = BetweenSteps(clock)
    between.begin()
    for steps in (4, 1):
        for _ in range(steps):
            time.sleep(0.1)
            between.checkpoint_ms()
        between.find_slowest()
    assert own == pytest.approx([0.1, 0.1], abs=0.05)
