"""How far the results of an emulated program are from what they should be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megajax.emulate.execute import Index


class Difference(NamedTuple):
    """The largest difference of a result from what is expected, over the largest element of that."""

    name: str
    error: float


def difference(name: str, pieces: Sequence[tuple[Index, np.ndarray]], expected: Any) -> Difference:
    """Compare every device's piece, replicas too; infinite where one is not a number."""
    wanted = np.asarray(expected, np.float64)
    worst = max(_largest(np.asarray(piece, np.float64) - wanted[place]) for place, piece in pieces)
    scale = _largest(wanted)
    error = worst / scale if scale and worst else worst
    return Difference(name, np.inf if np.isnan(error) else error)


def _largest(x: np.ndarray) -> float:
    largest = float(np.abs(x).max(initial=0))
    return np.inf if np.isnan(largest) else largest
