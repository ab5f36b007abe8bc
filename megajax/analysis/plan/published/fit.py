"""The efficiencies of a GPU or die, and programs' slowdowns, fitted to published training rates.

The fitted numbers have the least mean error on the rows that are not held out. The share of the
memory's bandwidth that a step's kernels reach is not fitted, because a few rows cannot distinguish
it from the cost of matmuls' sizes.
"""

import dataclasses
import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from megajax.analysis.plan.published.predictions import Prediction, predicted
from megajax.analysis.plan.published.rates import PublishedRate
from megajax.core.hardware.dies import Efficiency, Fit, Seen, die
from megajax.core.hardware.records import Hardware, hardware

# The first step of each number; it is halved five times.
STEPS = {
    **dict.fromkeys(('matmul', 'flash', 'flash_2', 'fp8', 'slowdown'), 0.04),
    'half_size': 64.0,
}
LEAST = {**dict.fromkeys(STEPS, 0.05), 'half_size': 0.0, 'slowdown': 1.0}
MOST = {**dict.fromkeys(STEPS, 1.0), 'half_size': 1024.0, 'fp8': 1.3, 'slowdown': 2.0}


class Fitted(NamedTuple):
    """The efficiencies of a GPU or die, and the slowdown of a program on it."""

    efficiency: Efficiency
    slowdown: float


def fit(
    start: Efficiency, rows: Sequence[PublishedRate], names: Sequence[str], slowdown: float = 1.0
) -> Fitted:
    """Fit the named efficiencies, and the slowdown of the rows' program, to the rows.

    The efficiencies are changed one at a time, by smaller and smaller steps, while the mean error
    falls.
    """
    values: dict[str, float] = {**start.model_dump(), 'slowdown': slowdown}
    least = _mean_error(values, rows)
    for halvings in range(6):
        improved = True
        while improved:
            improved = False
            for name in names:
                for sign in (1, -1):
                    value = values[name] + sign * STEPS[name] / 2**halvings
                    if not LEAST[name] <= value <= MOST[name]:
                        continue
                    candidate = {**values, name: value}
                    error = _mean_error(candidate, rows)
                    if error < least - 1e-9:
                        values, least, improved = candidate, error, True
    slowdown = values.pop('slowdown')
    return Fitted(start.model_copy(update=values), slowdown)


def with_efficiency(gpu: Hardware, efficiency: Efficiency) -> Hardware:
    """Return a GPU whose die has these efficiencies, at the clock of the GPU's power limit."""
    if gpu.die:
        clock = die(gpu.die).clock(gpu.power, gpu.peak_flops['bfloat16'])
        efficiency = efficiency.at_clock(clock)
    return gpu.model_copy(update={'efficiency': efficiency})


def residuals(predictions: Sequence[Prediction], numbers: int) -> Fit:
    """Return the absolute relative errors of fitted rows, for all programs and for each program.

    `numbers` is the count of fitted numbers, of which at most two belong to one program.
    """
    programs = dict.fromkeys(one.row.program.name for one in predictions)
    by_program = {
        name: [one for one in predictions if one.row.program.name == name] for name in programs
    }
    return Fit(
        rows=len(predictions),
        mean=round(fmean(abs(one.error) for one in predictions), 3),
        band=_band(predictions, numbers),
        programs={name: _seen(found, min(numbers, 2)) for name, found in by_program.items()},
    )


def _seen(predictions: Sequence[Prediction], numbers: int) -> Seen:
    return Seen(
        rows=len(predictions),
        band=_band(predictions, numbers),
        gpus=max(one.row.num_gpus for one in predictions),
        dtypes=tuple(sorted({one.row.config.train.dtype for one in predictions})),
    )


def _band(predictions: Sequence[Prediction], numbers: int) -> float:
    """Return the error that 90% of the rows that were not fitted should not exceed.

    It is the error of rank 0.9 (n + 1) among the n fitted rows (Vovk et al., 2005, conformal
    prediction), enlarged because fitted rows are closer: by sqrt((n + p) / (n - p)) for p numbers
    (Akaike, 1970, final prediction error).
    """
    errors = sorted(abs(one.error) for one in predictions)
    count = len(errors)
    rank = min(count, math.ceil(0.9 * (count + 1)))
    left = max(1, count - numbers)
    return round(errors[rank - 1] * math.sqrt((count + numbers) / left), 3)


def mean_error(efficiency: Efficiency, rows: Sequence[PublishedRate], slowdown: float) -> float:
    """Return the mean error of rows on GPUs with these efficiencies, with a program's slowdown."""
    errors = []
    for row in rows:
        program = dataclasses.replace(row.program, slowdown=slowdown)
        gpu = with_efficiency(hardware(row.gpu), efficiency)
        errors.append(abs(predicted(dataclasses.replace(row, program=program), gpu).error))
    return fmean(errors)


def _mean_error(values: dict[str, float], rows: Sequence[PublishedRate]) -> float:
    numbers = dict(values)
    slowdown = numbers.pop('slowdown')
    return mean_error(Efficiency.model_validate(numbers), rows, slowdown)
