"""A GPU's efficiencies, fitted to published training rates.

The fitted efficiencies have the least mean error on the rows that are not held out. At most three
numbers are fitted per GPU. The share of the memory bandwidth that a step's kernels reach is not
fitted, because a few rows cannot distinguish it from the effect of the matmuls' sizes.
"""

from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import NamedTuple

from megajax.analysis.plan.published.predictions import Prediction, predicted
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.core.hardware.records import Efficiency, Hardware

# The first step of each efficiency; it is halved five times.
STEPS = {'matmul': 0.04, 'flash': 0.04, 'flash_2': 0.04, 'half_size': 64.0}
LEAST = {'matmul': 0.05, 'flash': 0.05, 'flash_2': 0.05, 'half_size': 0.0}


class Residuals(NamedTuple):
    """The absolute relative errors of fitted rows."""

    rows: int  # number of fitted rows
    mean: float
    band: float  # the error that 90% of the rows stay within


def fit(gpu: Hardware, rows: Sequence[PublishedRate], names: Sequence[str]) -> Efficiency:
    """Return a GPU's efficiencies with the named ones fitted to the rows.

    The efficiencies are changed one at a time, by smaller and smaller steps, while the mean error
    falls.
    """
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
    """Return the residuals of some rows."""
    errors = [abs(prediction.error) for prediction in predictions]
    return Residuals(len(errors), fmean(errors), quantiles(errors, n=10, method='inclusive')[-1])


def _mean_error(gpu: Hardware, efficiency: Efficiency, rows: Sequence[PublishedRate]) -> float:
    candidate = gpu.model_copy(update={'efficiency': efficiency})
    return fmean(abs(predicted(row, candidate).error) for row in rows)
