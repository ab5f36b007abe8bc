"""A chart shows its values where the axes say, with few dots and with tooltips."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from megajax.analysis.report.chart import (
    HEIGHT,
    LEFT,
    MAX_DOTS,
    NUM_COLORS,
    RIGHT,
    STRIPS,
    WIDTH,
    Line,
    chart,
)
from megajax.analysis.report.downsample import Curve
from megajax.analysis.report.scale import scale_of


def line(x: np.ndarray, y: np.ndarray, *, is_dotted: bool = False, band: float = 0.0) -> Line:
    curve = Curve(x=x, y=y, low=y - band, high=y + band)
    return Line(name='loss', curve=curve, color=1, is_dotted=is_dotted)


def test_a_tooltip_has_the_step_in_its_strip_and_the_value_there():
    x = np.arange(100, 701, dtype=float)
    drawn = str(chart('title', [line(x, 2 * x)], y='nats'))
    tips = re.findall(r'<title>step ([\d,]+)\nloss: ([\d,]+)</title>', drawn)
    left = np.array(re.findall(r'<rect x="([\d.]+)"', drawn), float)
    steps, values = np.array([[float(n.replace(',', '')) for n in tip] for tip in tips]).T
    width = (WIDTH - LEFT - RIGHT) / STRIPS
    np.testing.assert_allclose(left, LEFT + width * np.arange(STRIPS), atol=0.06)
    across = scale_of([*x], LEFT, WIDTH - RIGHT)
    middles = [across(step) for step in steps]
    np.testing.assert_allclose(middles, left + width / 2, atol=1)
    np.testing.assert_allclose(values, 2 * steps.clip(x[0], x[-1]), atol=2)


@pytest.mark.parametrize('count', [1, MAX_DOTS, MAX_DOTS + 1, 10 * MAX_DOTS])
def test_a_line_has_at_most_so_many_dots_each_at_its_value(count: int):
    x = np.arange(count, dtype=float)
    drawn = str(chart('title', [line(x, x, is_dotted=True)], y='nats'))
    dots = [(float(a), float(b)) for a, b in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert min(count, MAX_DOTS) / 2 < len(dots) <= MAX_DOTS
    if count > 1:
        assert dots[0][0] == LEFT
        assert all(a < b for (a, _), (b, _) in itertools.pairwise(dots))
        assert all(a > b for (_, a), (_, b) in itertools.pairwise(dots))
    assert all(LEFT <= a <= WIDTH - RIGHT and 0 < b < HEIGHT for a, b in dots)


def test_a_tooltip_has_a_large_value_without_an_exponent():
    x = np.arange(2.0)
    drawn = str(chart('title', [line(x, np.full(2, 123_456.0))], y='tokens/s'))
    assert 'loss: 123,456</title>' in drawn


def test_only_a_curve_of_averages_has_a_band_and_an_empty_one_no_figure():
    x = np.arange(3.0)
    assert 'class="band' in str(chart('title', [line(x, x, band=0.1)], y='nats'))
    assert 'class="band' not in str(chart('title', [line(x, x)], y='nats'))
    assert str(chart('title', [line(x[:0], x[:0])], y='nats')) == ''


def test_lines_beyond_the_colors_have_them_again_in_another_style():
    x = np.arange(2.0)
    for color, style in ((NUM_COLORS - 1, f'c{NUM_COLORS - 1}'), (NUM_COLORS, 'c0 second')):
        drawn = str(chart('title', [dataclasses.replace(line(x, x), color=color)], y='nats'))
        assert f'class="line thin {style}"' in drawn
