"""Axes of a chart: a range, its ticks and their labels."""

import dataclasses
import math
from collections.abc import Sequence

_STEPS = 1.0, 2.0, 2.5, 5.0, 10.0
_FEW = 3  # fewest ticks of an axis whose ticks are logarithmic
_MANY = 7
_LARGEST = 1e100  # largest value that is drawn to scale: the range of larger values may overflow
SMALL = 0.01  # labels may have exponents if all ticks are smaller


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """A range of values, linear or logarithmic, that is drawn from `start` to `end` in pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value, which is at most a little outside of the range."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(max(value, 1e-300))
        width = high - low
        share = (min(max(at, low - width), high + width) - low) / width
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Return round values within the range, at which lines are drawn."""
        if self.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1,), (1, 3), (1, 2, 5)):
                ticks = [digit * 10.0**power for power in powers for digit in digits]
                inside = [tick for tick in ticks if self.low <= tick <= self.high]
                if len(inside) >= _FEW:
                    return inside[:: math.ceil(len(inside) / _MANY)]
        step = _round_step((self.high - self.low) / 5)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale_of(values: Sequence[float], start: float, end: float, *, is_log: bool = False) -> Scale:
    """Return a scale for values up to `_LARGEST`; a logarithmic one has only positive values."""
    smallest = 1 / _LARGEST if is_log else -_LARGEST
    values = [value for value in values if smallest <= value <= _LARGEST]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if is_log and values:
        room = max((high / low) ** 0.04, 1.01)
        return Scale(low=low / room, high=high * room, start=start, end=end, is_log=True)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low = 0.0 if 0 <= low <= room else low - room
    return Scale(low=low, high=high + room, start=start, end=end)


def label(value: float, ticks: Sequence[float] = ()) -> str:
    """Return a label for a number on an axis, with as many digits as the ticks of the axis need."""
    ticks = ticks or (value,)
    significant = next(
        (n for n in range(3, 9) if all(_is_exact(tick, f'.{n}g') for tick in ticks)), 9
    )
    for size, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if max(size, 1e4) <= abs(value) < 1e15:
            return f'{value / size:.{significant}g}{unit}'
    if value == 0 or abs(value) >= 1e15 or max(map(abs, ticks)) < SMALL:
        return f'{value:.{significant}g}'
    decimals = next((n for n in range(6) if all(_is_exact(tick, f'.{n}f') for tick in ticks)), 6)
    return f'{value:,.{decimals}f}'


def _is_exact(value: float, form: str) -> bool:
    return math.isclose(float(format(value, form)), value, rel_tol=1e-9, abs_tol=1e-300)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in _STEPS if digit * power >= step * 0.999)
