"""Axes have a few round ticks inside their range, with labels that differ."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megajax.analysis.report.scale import label, scale_of

magnitudes = st.floats(-12, 12).map(lambda power: 10.0**power)


@given(magnitudes, magnitudes, st.booleans())
def test_an_axis_has_a_few_ticks_in_its_range_with_labels_that_differ(
    low: float, width: float, is_log: bool
) -> None:
    if width < 1e-3 * low:
        return
    scale = scale_of([low, low + width], 0, 400, is_log=is_log)
    assert 2 <= len(scale.ticks) <= 9
    assert all(-1e-6 <= scale(tick) <= 400 + 1e-6 for tick in scale.ticks)
    assert all(0 <= scale(value) <= 400 for value in (low, low + width))
    labels = [label(tick, () if is_log else scale.ticks) for tick in scale.ticks]
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize(
    ('value', 'ticks', 'shown'),
    [
        (0, [0, 1], '0'),
        (3, [2, 3, 4], '3'),
        (2.5, [2, 2.5, 3], '2.5'),
        (5000, [0, 5000], '5,000'),
        (25_000, [0, 25_000], '25k'),
        (1.5e6, [0, 1.5e6], '1.5M'),
        (1.5e9, [0, 1.5e9], '1.5G'),
        (2e12, [0, 2e12], '2T'),
        (9.99e14, [0, 9.99e14], '999T'),
        (1e15, [0, 1e15], '1e+15'),
        (1.5e15, [0, 1.5e15], '1.5e+15'),
        (5e-4, [0, 5e-4], '0.0005'),
        (0.001, (), '0.001'),
    ],
)
def test_labels_are_as_short_as_their_ticks_allow(
    value: float, ticks: list[float], shown: str
) -> None:
    assert label(value, ticks) == shown


@given(st.lists(st.floats(), max_size=4), st.booleans())
@example([], False)
@example([], True)
@example([5.0], False)
@example([5.0], True)
@example([0.0, 0.0], False)
@example([0.0, 0.0], True)
@example([math.nan], False)
@example([math.nan], True)
@example([1.0, 1.7e308], True)
@example([-1.7e308, 1.7e308], False)
@example([0.0, 5e-324], False)
@example([0.0, 1e-322], False)
@example([1.0, math.nextafter(1.0, 2.0)], False)
def test_any_values_have_an_axis(values: list[float], is_log: bool) -> None:
    scale = scale_of(values, 0, 400, is_log=is_log)
    assert scale.low < scale.high
    assert 2 <= len(scale.ticks) <= 9
    assert all(math.isfinite(scale(value)) for value in values if not math.isnan(value))
    assert all(label(tick, scale.ticks) for tick in scale.ticks)
