"""Shares of a step, on events written by hand and on random ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.analysis.profile.intervals import Divided, Idle, divide
from megajax.analysis.profile.trace import Event, Window

STEP = Window(0.0, 10.0)


def divided(*events: tuple[str, float, float]) -> Divided:
    """A step of 10 s; a transfer's name begins with `all`."""
    named = [Event(name, 'step', start, end) for name, start, end in events]
    return divide(named, STEP, lambda name: name.startswith('all'))


def shares(*events: tuple[str, float, float]) -> dict[str, float]:
    return {timed.name: timed.share for timed in divided(*events).events}


def test_a_transfer_is_hidden_while_a_kernel_of_another_stream_runs_and_else_exposed():
    step = divided(('dot', 1, 5), ('all-reduce', 3, 8), ('add', 9, 10))
    (_, reduce, _) = step.events
    assert (reduce.seconds, reduce.share) == (5, 3)
    assert step.idle == Idle(before=1, between=1, after=0)


def test_kernels_and_exposed_transfers_that_run_together_share_the_time_equally():
    assert shares(('a', 0, 4), ('b', 2, 4)) == {'a': 3, 'b': 1}
    assert shares(('all-reduce', 0, 4), ('all-gather', 2, 6)) == {'all-reduce': 3, 'all-gather': 3}


def test_events_count_only_inside_the_step_and_nothing_is_all_idle():
    step = divided(('before', -5, 0), ('a', -5, 2), ('b', 20, 30), ('c', 9, 12))
    assert [(timed.name, timed.seconds) for timed in step.events] == [('a', 2), ('c', 1)]
    assert sum(divided().idle) == divided().seconds == 10


def test_an_event_without_length_takes_nothing_and_lets_no_other_take_more():
    step = divided(('a', 2, 2), ('b', 2, 5), ('a', 5, 5))
    assert [timed.share for timed in step.events] == [0, 3, 0]
    assert step.idle == Idle(before=2, between=0, after=5)


moments = st.floats(-1, 11, allow_nan=False)
events = st.tuples(st.sampled_from(['dot', 'add', 'all-reduce', 'all-gather']), moments, moments)


@given(st.lists(events.map(lambda event: (event[0], *sorted(event[1:]))), max_size=12))
def test_shares_and_idle_time_add_up_to_the_step(drawn):
    step = divided(*drawn)
    total = sum(timed.share for timed in step.events) + sum(step.idle)
    assert total == pytest.approx(step.seconds)
    assert all(0 <= timed.share <= timed.seconds + 1e-9 for timed in step.events)
    assert min(step.idle) >= 0
