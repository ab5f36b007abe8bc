"""Limits on a compiled step, read from a file for CI: `megajax inspect --budget`."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field, NonNegativeFloat, field_validator

from megajax.analysis.inspect.kernels import total, totals
from megajax.analysis.inspect.result import Finding, Inspection
from megajax.core.config.section import Section
from megajax.core.parallel.mesh import Axis
from megajax.xla.hlo.kernels import KINDS, Kind


class Budget(Section):
    """The limits per step and device; a key that is not set has no limit."""

    milliseconds: NonNegativeFloat | None = None  # kernels + exposed communication
    gigabytes: NonNegativeFloat | None = None  # GB that kernels read and write
    temporaries: NonNegativeFloat | None = None  # GB of temporary arrays
    launches: NonNegativeFloat | None = None  # number of kernels
    kinds: dict[Kind, NonNegativeFloat] = Field(default={})  # GB by kind of kernel
    wire: dict[Axis, NonNegativeFloat] = Field(default={})  # GB sent by mesh axis

    @field_validator('kinds', mode='before')
    @classmethod
    def _in_todays_words(cls, kinds: Any) -> Any:
        if not isinstance(kinds, dict):
            return kinds
        return {'matmul' if name == 'product' else name: limit for name, limit in kinds.items()}


def over_budget(inspection: Inspection, budget: Budget) -> Iterator[Finding]:
    """Yield an error for each limit that a step exceeds."""
    for name, found, limit in _compared(inspection, budget):
        if limit is not None and found > limit:
            message = f'{name} {found:,.3f}, the limit is {limit:,g}'
            yield Finding(level='error', rule='over budget', message=message)


def _compared(inspection: Inspection, budget: Budget) -> Iterator[tuple[str, float, float | None]]:
    """Yield the name of each limit, the step's value, and the limit."""
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
