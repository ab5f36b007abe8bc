"""Draw charts as inline SVG in the colors of the page's style sheet.

A chart is half as wide as the page. Down to 400 pixels, its text stays as large as the page's text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from megajax.analysis.report.downsample import Curve
from megajax.analysis.report.html import Html, element, join
from megajax.analysis.report.scale import Scale, label, scale_of
from megajax.base.render.units import rounded

WIDTH, HEIGHT = 460, 270  # pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 24, 40  # pixels around the frame
NUM_COLORS = 8
MAX_DOTS = 40  # most dots on a line that is drawn with dots
IN_RANGE = 0.9  # share of a band's values that the y range covers
FAR_APART = 4.0  # ratio of the means of two curves that need a logarithmic axis
STRIPS = 60  # number of strips of the x axis with a tooltip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A curve of a chart and its style."""

    name: str
    curve: Curve
    color: int  # index of the run, which determines the color
    is_dotted: bool = False  # draw each point, because there are few


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    y: str,
    is_log: bool = False,
    from_zero: bool = False,
    legend: bool = True,
) -> Html:
    """Return a figure of lines; `y` names its axis with its unit.

    The figure is empty if no line has a value. The y range covers the lines and most of the bands,
    and starts at zero if `from_zero` is set.
    """
    lines = [line for line in lines if len(line.curve.x)]
    if not lines:
        return Html()
    across = scale_of([v for line in lines for v in line.curve.x], LEFT, WIDTH - RIGHT)
    heights = [height for line in lines for height in _heights(line.curve)]
    heights += [0.0] if from_zero else []
    up = scale_of(heights, HEIGHT - BOTTOM, TOP, is_log=is_log)
    drawing = element(
        'svg',
        _axes(across, up, y),
        element('svg', *(_drawn(line, across, up) for line in lines), **_frame(across, up)),
        _strips(lines, across),
        viewBox=f'0 0 {WIDTH} {HEIGHT}',
        role='img',
        aria_label=f'{title}: {y} by step',
    )
    keys = _legend(lines) if legend else Html()
    return element('figure', element('figcaption', title), drawing, keys)


def _heights(curve: Curve) -> list[float]:
    """Return the values that the y range of a chart must cover."""
    inside = [np.quantile(curve.low, 1 - IN_RANGE), np.quantile(curve.high, IN_RANGE)]
    return [*map(float, curve.y), *map(float, inside)]


def spread(lines: Sequence[Line]) -> bool:
    """Return whether curves are so far apart that they need a logarithmic axis."""
    means = [float(np.mean(line.curve.y)) for line in lines if len(line.curve.y)]
    return len(means) > 1 and min(means) > 0 and max(means) > FAR_APART * min(means)


def chip(color: int) -> Html:
    """Return a patch in the color of a run."""
    return element('i', class_=f'chip c{color % NUM_COLORS}')


def _frame(across: Scale, up: Scale) -> dict[str, str]:
    """Return attributes of an inner SVG that clips at the frame, with outer coordinates."""
    width, height = across.end - across.start, up.start - up.end
    box = f'{across.start} {up.end} {width} {height}'
    return {
        'x': f'{across.start}',
        'y': f'{up.end}',
        'width': f'{width}',
        'height': f'{height}',
        'viewBox': box,
    }


def _axes(across: Scale, up: Scale, y: str) -> Html:
    bottom, parts = up.start, list[Html]()
    for tick in up.ticks:
        at = f'{up(tick):.1f}'
        parts += [
            element('line', x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_='grid'),
            element(
                'text',
                label(tick, () if up.is_log else up.ticks),
                x=LEFT - 6,
                y=at,
                dy='0.32em',
                class_='tick end',
            ),
        ]
    for tick in across.ticks:
        at = f'{across(tick):.1f}'
        parts += [
            element('line', x1=at, x2=at, y1=bottom, y2=bottom + 4, class_='axis'),
            element('text', label(tick, across.ticks), x=at, y=bottom + 17, class_='tick middle'),
        ]
    parts += [
        element('line', x1=LEFT, x2=WIDTH - RIGHT, y1=bottom, y2=bottom, class_='axis'),
        element('text', y, x=0, y=13, class_='unit'),
        element('text', 'step', x=WIDTH - RIGHT, y=HEIGHT - 6, class_='unit end'),
    ]
    return join(parts)


def _drawn(line: Line, across: Scale, up: Scale) -> Html:
    curve, color = line.curve, f'c{line.color % NUM_COLORS}'
    style = f'{color} second' if line.color >= NUM_COLORS else color
    parts = []
    if not np.array_equal(curve.low, curve.high):
        there = _points(curve.x, curve.high, across, up)
        back = _points(curve.x[::-1], curve.low[::-1], across, up)
        parts.append(element('path', d=f'M{there}L{back}Z', class_=f'band {color}'))
    path = f'M{_points(curve.x, curve.y, across, up)}'
    kind = 'line' if line.is_dotted else 'line thin'
    parts.append(element('path', d=path, class_=f'{kind} {style}'))
    if line.is_dotted or len(curve.x) == 1:
        parts += [
            element(
                'circle',
                cx=f'{across(a):.1f}',
                cy=f'{up(b):.1f}',
                r='2.6',
                class_=f'dot {color}',
            )
            for a, b in [*zip(curve.x, curve.y, strict=True)][:: -(-len(curve.x) // MAX_DOTS)]
        ]
    return join(parts)


def _points(x: np.ndarray, y: np.ndarray, across: Scale, up: Scale) -> str:
    return 'L'.join(f'{across(a):.1f} {up(b):.1f}' for a, b in zip(x, y, strict=True))


def _strips(lines: Sequence[Line], across: Scale) -> Html:
    """Return transparent strips whose tooltips give the values of the lines there."""
    width = (across.end - across.start) / STRIPS
    parts = []
    for number in range(STRIPS):
        share = (number + 0.5) / STRIPS
        middle = across.low + share * (across.high - across.low)
        values = [f'step {middle:,.0f}']
        for line in lines:
            nearest = int(np.argmin(np.abs(line.curve.x - middle)))
            values.append(f'{line.name}: {rounded(line.curve.y[nearest], 4)}')
        parts.append(
            element(
                'rect',
                element('title', '\n'.join(values)),
                x=f'{across.start + number * width:.1f}',
                y=TOP,
                width=f'{width:.1f}',
                height=HEIGHT - TOP - BOTTOM,
                class_='strip',
            )
        )
    return join(parts)


def _legend(lines: Sequence[Line]) -> Html:
    return element(
        'p',
        *(
            element(
                'span',
                element(
                    'i',
                    class_=f'key c{line.color % NUM_COLORS} {"dotted" if line.is_dotted else ""}',
                ),
                line.name,
            )
            for line in lines
        ),
        class_='legend',
    )
