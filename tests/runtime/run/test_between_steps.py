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
        between.find_slowest(steps=1)
    assert clock.seconds('productive') >= 0.2
    assert clock.seconds('other') < 0.1
    assert max(own) < 0.1
