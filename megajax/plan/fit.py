"""A GPU's efficiencies from published rates of training: those of least mean error on the rows that are not held out.

Three numbers a GPU at most; a share of the memory's bandwidth that the kernels of a step reach is
not fitted, because a few rows cannot tell it from what the sizes of products cost.
"""

from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import NamedTuple

from megajax.hardware.records import Efficiency, Hardware
from megajax.plan.predictions import Prediction, Row, predicted

STEPS = {
    'matmul': 0.04,
    'flash': 0.04,
    'flash_2': 0.04,
    'half_size': 64.0,
}  # the first; it is halved five times
LEAST = {'matmul': 0.05, 'flash': 0.05, 'flash_2': 0.05, 'half_size': 0.0}


class Residuals(NamedTuple):
    """Of the rows that were fitted: how many, their mean error, and what nine of ten are within."""

    rows: int
    mean: float
    band: float


def fit(gpu: Hardware, rows: Sequence[Row], names: Sequence[str]) -> Efficiency:
    """Change these efficiencies of a GPU, one at a time and by smaller and smaller steps, while the mean error falls."""
    best = gpu.efficiency
    least = _mean_error(gpu, best, rows)
    for halvings in range(6):
        improved = True
        while improved:
            improved = False
            for name in names:
                for sign in (1, -1):
                    value = getattr(best, name) + sign * STEPS[name] / 2**halvings
                    if not LEAST[name] <= value <= (1024 if name == 'half_size' else 1):
                        continue
                    candidate = best.model_copy(update={name: value})
                    error = _mean_error(gpu, candidate, rows)
                    if error < least - 1e-9:
                        best, least, improved = candidate, error, True
    return best


def residuals(predictions: Sequence[Prediction]) -> Residuals:
    """Of some rows."""
    errors = [abs(one.error) for one in predictions]
    return Residuals(len(errors), fmean(errors), quantiles(errors, n=10, method='inclusive')[-1])


def _mean_error(gpu: Hardware, efficiency: Efficiency, rows: Sequence[Row]) -> float:
    with_it = gpu.model_copy(update={'efficiency': efficiency})
    return fmean(abs(predicted(row, with_it).error) for row in rows)
