"""Limits of a compiled step, which a file keeps and a CI compares with: `--budget`."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeFloat

from megajax.analysis.inspect.kernels import total, totals
from megajax.analysis.inspect.result import Finding, Inspection
from megajax.core.config.section import Section
from megajax.xla.hlo.kernels import KINDS, Kind

Axis = Literal['replica', 'stage', 'data', 'context', 'row', 'model']


class Budget(Section):
    """The most that a step on one device may take; what is left out is not limited."""

    milliseconds: NonNegativeFloat | None = None  # of kernels + waiting
    gigabytes: NonNegativeFloat | None = None  # that kernels read and write
    temporaries: NonNegativeFloat | None = None  # GB
    launches: NonNegativeFloat | None = None  # of kernels
    kinds: dict[Kind, NonNegativeFloat] = Field(default={})  # GB by kind of kernel
    wire: dict[Axis, NonNegativeFloat] = Field(default={})  # GB by mesh axis


def over_budget(inspection: Inspection, budget: Budget) -> Iterator[Finding]:
    """Yield an error for each limit that a step exceeds."""
    for name, found, limit in _compared(inspection, budget):
        if limit is not None and found > limit:
            message = f'{name} {found:,.3f}, the limit is {limit:,g}'
            yield Finding(level='error', rule='over budget', message=message)


def _compared(inspection: Inspection, budget: Budget) -> Iterator[tuple[str, float, float | None]]:
    """Yield what is limited, what the step takes of it, and the limit."""
    whole = total(inspection.kernels)
    by_kind = totals(inspection.kernels, lambda kernel: (kernel.kind,))
    seconds = (inspection.compute_seconds or 0.0) + (inspection.exposed_seconds or 0.0)
    yield 'milliseconds', 1e3 * seconds, budget.milliseconds
    yield 'gigabytes', whole.bytes / 1e9, budget.gigabytes
    yield 'temporaries', inspection.memory.temporaries / 1e9, budget.temporaries
    yield 'launches', whole.launches, budget.launches
    for kind in KINDS:
        found = by_kind[kind,].bytes if (kind,) in by_kind else 0
        yield f'kinds.{kind}', found / 1e9, budget.kinds.get(kind)
    for axis, limit in budget.wire.items():
        yield f'wire.{axis}', inspection.sent_over(axis) / 1e9, limit
