"""Compute the error band of a predicted time, within which 90% of measured times should be.

The band of a program on a die comes from its fitted rows. It widens for everything that these rows
do not cover. The terms are treated as independent, so their squares are added.
"""

import math
from typing import NamedTuple

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Software
from megajax.analysis.plan.time import StepTime
from megajax.base.render.units import count
from megajax.core.config import Config
from megajax.core.hardware.dies import Fit, Seen

ENOUGH = 10  # fewest rows of a program from which its own band follows
# The spread of the programs' slowdowns: a program without a row may have any of them.
OTHER_PROGRAM = 0.15
# An assumption, for layers that no fitted row has: as much as for a different program.
OTHER_LAYERS = 0.15
OTHER_DTYPE = 0.1  # for an assumed efficiency, such as FP8's before it was measured
DOUBLING = 0.02  # for each doubling of the GPUs beyond the largest row
OVERLAP = 0.5  # share of the hidden time, if all rows are of one GPU and hide nothing


class Band(NamedTuple):
    """The relative error that 90% of predictions do not exceed, and why it is that wide.

    Each reason ends with its own relative error. `error` is the root of the sum of their squares.
    """

    error: float
    reasons: tuple[str, ...]


def band(config: Config, time: StepTime, cluster: Cluster, program: Software) -> Band | None:
    """Return the band of a predicted time; None if nothing was measured on the GPU."""
    fit = cluster.hardware.fit
    if fit is None:
        return None
    seen = fit.programs.get(program.name)
    beyond = _beyond(config, time, cluster, seen or _of_all(fit))
    terms = [_of_rows(fit, seen, program), *beyond]
    if config.train.has_delayed_scales and program.rounding is None:
        terms.append((OTHER_DTYPE, f'no {program.name} step with delayed scaling was measured'))
    error = math.sqrt(sum(size**2 for size, _ in terms))
    return Band(error, tuple(f'{reason} (\u00b1 {size:.0%})' for size, reason in terms if size))


def _of_rows(fit: Fit, seen: Seen | None, program: Software) -> tuple[float, str]:
    if seen is None:
        why = (
            f'no {program.name} step was measured on the die'
            if fit.programs
            else 'the file has no fit.programs, which says what was measured: calibrate again'
        )
        return math.hypot(fit.band, OTHER_PROGRAM), why
    if seen.rows >= ENOUGH:
        return seen.band, f'{seen.rows} published throughputs of {program.name}'
    few = 'one throughput' if seen.rows == 1 else f'{seen.rows} throughputs'
    return max(seen.band, fit.band), f'only {few} of {program.name} fitted'


def _beyond(
    config: Config, time: StepTime, cluster: Cluster, seen: Seen
) -> list[tuple[float, str]]:
    """Return the terms for everything that the rows do not cover, with their reasons."""
    terms, dtype = [], config.train.dtype
    for layers, section in (('experts', config.model.experts), ('images', config.vision)):
        if section is not None:
            terms.append((OTHER_LAYERS, f'no step with {layers} was fitted'))
    if dtype not in seen.dtypes and not {dtype, *seen.dtypes} <= {'bfloat16', 'float16'}:
        measured = 'was' if seen.dtypes else 'is known to be'
        terms.append((OTHER_DTYPE, f'no {dtype} step {measured} measured'))
    if cluster.num_devices > seen.gpus:
        doublings = math.log2(cluster.num_devices / seen.gpus)
        terms.append((DOUBLING * doublings, f'at most {count(seen.gpus, "GPU")} measured'))
    hidden = sum(transfer.hidden for transfer in time.transfers) / time.total
    if seen.gpus == 1 and hidden:
        reason = f'its overlap, of transfers for {hidden:.0%} of the step, was not measured'
        terms.append((OVERLAP * hidden, reason))
    return terms


def _of_all(fit: Fit) -> Seen:
    """Return what the rows of all programs cover together, or the least if they are unknown."""
    every = fit.programs.values()
    return Seen(
        rows=fit.rows,
        band=fit.band,
        gpus=max((one.gpus for one in every), default=1),
        dtypes=tuple({dtype for one in every for dtype in one.dtypes}),
    )
