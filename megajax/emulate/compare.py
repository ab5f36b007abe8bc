"""How far the results of an emulated program are from what they should be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.emulate.execute import Index


class Difference(NamedTuple):
    """The largest difference of a result from what is expected, over the largest element of that."""

    name: str
    error: float


def difference(
    name: str, pieces: Sequence[tuple[Index, np.ndarray]], expected: Any, *, scale: float = 0.0, rounding: float = 0.0
) -> Difference:
    """Compare every device's piece, replicas too; infinite where one is not a number.

    What is expected to be less than `rounding` of `scale`, the size of its like, is rounding alone
    and is measured on that scale.
    """
    wanted = np.asarray(expected, np.float64)
    worst = max(largest(np.asarray(piece, np.float64) - wanted[place]) for place, piece in pieces)
    own = largest(wanted)
    scale = own if own > rounding * scale else scale
    error = worst / scale if scale and worst else worst
    return Difference(name, np.inf if np.isnan(error) else error)


def largest(x: Any) -> float:
    """The largest absolute element; infinite where one is not a number."""
    found = float(np.abs(np.asarray(x, np.float64)).max(initial=0))
    return np.inf if np.isnan(found) else found
