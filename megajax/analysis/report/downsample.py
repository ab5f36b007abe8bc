"""Curves with fewer points: the mean of each bucket of steps, and its extremes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """The points of a curve and the band around them; all arrays have one length."""

    x: Floats
    y: Floats  # mean of the bucket
    low: Floats  # smallest value of the bucket
    high: Floats  # largest value of the bucket


def thin(x: Floats, y: Floats, buckets: int) -> Curve:
    """Return a curve of at most `buckets` points; values that are not finite are skipped.

    All buckets have the same number of values, so a gap in `x` stays a gap.
    """
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= buckets:
        return Curve(x, y, y, y)
    starts = np.linspace(0, len(x), buckets, endpoint=False).astype(int)
    counts = np.diff([*starts, len(x)])
    return Curve(
        np.add.reduceat(x, starts) / counts,
        np.add.reduceat(y, starts) / counts,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )
