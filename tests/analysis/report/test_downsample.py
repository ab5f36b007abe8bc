"""Thinned curves keep the mean and the extremes of what they leave out."""

import numpy as np
import pytest

from megajax.analysis.report.downsample import thin


def test_few_points_stay_as_they_are() -> None:
    x, y = np.arange(5.0), np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    curve = thin(x, y, 5)
    assert all(np.array_equal(values, y) for values in (curve.y, curve.low, curve.high))
    assert np.array_equal(curve.x, x)


@pytest.mark.parametrize('count', [241, 1000, 54_321])
def test_many_points_become_few_with_their_mean_and_extremes(count: int) -> None:
    x, y = np.arange(count, dtype=float), np.random.default_rng(0).normal(size=count)
    y[count // 2] = 99.0
    curve = thin(x, y, 240)
    assert len(curve.x) == 240
    assert curve.high.max() == 99.0
    assert curve.low.min() == y.min()
    assert np.all((curve.low <= curve.y) & (curve.y <= curve.high))
    assert np.all(np.diff(curve.x) > 0)


def test_values_that_are_not_finite_are_left_out() -> None:
    y = np.array([1.0, np.nan, np.inf, 2.0])
    assert np.array_equal(thin(np.arange(4.0), y, 9).x, [0, 3])
    assert len(thin(np.arange(2.0), np.full(2, np.nan), 9).x) == 0
