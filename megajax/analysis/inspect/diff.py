"""Compare two inspections: of two commits, two configs or two versions of jax."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from megajax.analysis.inspect.kernels import total, totals
from megajax.analysis.inspect.peak_groups import by_file, grouped, total_bytes
from megajax.analysis.inspect.result import Finding, Inspection, Row, StepRun, Transfer

LEAST = 1e-3  # share of a step: parts that change by less are omitted
LARGE = 10  # a ratio that is easier to read than a percentage
_LINE = re.compile(r'\.py:\d+')
_OF_THE_STEP = 'matmuls run twice', 'matmuls rematerialized'  # at most one for a step


class Change(NamedTuple):
    """A number in both inspections; 0 if one of them does not have it."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def is_change(self) -> bool:
        """Whether the two values differ by more than rounding."""
        return abs(self.after - self.before) > 1e-6 * max(abs(self.before), abs(self.after))

    @property
    def text(self) -> str:
        """The relative change; words if nothing changed or the earlier value is 0."""
        if not self.is_change:
            return 'same'
        if not self.before:
            return 'new'
        ratio = self.after / self.before
        return 'gone' if not ratio else f'{ratio - 1:+.1%}' if ratio < LARGE else f'x {ratio:,.0f}'


class ChangedRow(NamedTuple):
    """The collectives of one site in one phase over one axis, which differ in two inspections."""

    site: str
    phase: str
    axis: str
    before: list[Transfer]
    after: list[Transfer]
    bytes: Change  # sent per step and device
    is_more: bool  # whether the later step sends more than Megatron's


class Difference(NamedTuple):
    """The differences of two inspections.

    `sent` has the bytes of all collectives, and `rows` has the collectives that differ, the largest
    change of bytes first. `totals` has the numbers of the whole step, and `memory` has the memory
    at the peak, by use. `parts` and `arrays` list only what differs by more than LEAST of the
    total. Arrays and findings are matched by file, not by line, because lines move. The numbers of
    a known miscompile, of repeated matmuls and of an exceeded limit can also differ.

    `new` and `gone` also have an error for each row that sends more than Megatron, and for each
    execution with a wrong result. `not_compared` names the executions that only one side has.
    """

    keys: list[tuple[str, str, str]]  # keys of the config, with both values
    sent: Change
    rows: list[ChangedRow]
    totals: list[Change]
    parts: list[Change]
    memory: list[Change]
    arrays: list[Change]
    new: list[Finding]
    gone: list[Finding]
    not_compared: list[str]


def difference(before: Inspection, after: Inspection) -> Difference:
    """Compare two inspections."""
    old, new = ([*each.findings, *_more_than_megatron(each)] for each in (before, after))
    before_runs, after_runs = ({run.mode: run for run in each.runs} for each in (before, after))
    old += _wrong(before_runs[mode] for mode in before_runs if mode in after_runs)
    new += _wrong(after_runs.values())
    return Difference(
        keys=[
            *_differing(_of_program(before), _of_program(after)),
            *_differing(*(_flat(YAML(typ='safe').load(each.config)) for each in (before, after))),
        ],
        sent=Change('sent', 'B', *(_sent(each.rows) for each in (before, after))),
        rows=sorted(
            _changed_rows(before, after),
            key=lambda row: -abs(row.bytes.after - row.bytes.before),
        ),
        totals=[*_changes(before, after, _totals)],
        parts=_large([*_changes(before, after, _parts)]),
        memory=[*_changes(before, after, _memory)],
        arrays=_large([*_changes(before, after, _arrays)]),
        new=[*_only_in(new, old)],
        gone=[*_only_in(old, new)],
        not_compared=[
            f'results not compared: only one of the two steps was executed {mode}'
            for mode in sorted(before_runs.keys() ^ after_runs.keys())
        ],
    )


def _more_than_megatron(inspection: Inspection) -> Iterator[Finding]:
    for row in inspection.rows:
        if row.verdict == 'MORE':
            place = f'{row.site} {row.phase} over {row.axis or "-"}'
            yield Finding(level='error', rule='MORE than Megatron', message=place)


def _wrong(runs: Iterable[StepRun]) -> Iterator[Finding]:
    for run in runs:
        if not run.ok:
            yield Finding(level='error', rule='wrong results', message=f'executed {run.mode}')


def _only_in(own: Sequence[Finding], others: Sequence[Finding]) -> Iterator[Finding]:
    """Yield the findings that the others lack; the same rule at the same place matches."""
    moved = Counter(_identity(each) for each in others if each not in own)
    for each in own:
        if each not in others:
            if moved[_identity(each)]:
                moved[_identity(each)] -= 1
            else:
                yield each


def _identity(finding: Finding) -> tuple[str, str, str]:
    """Return the level, rule and place of a finding, without what moves with another change.

    Lines move, XLA numbers its instructions anew, and a step over a limit can become faster.
    """
    message = _LINE.sub('.py', finding.message)
    if finding.rule.startswith('miscompiled: '):  # instruction at path (source): description
        message = message.partition(' at ')[2].partition('): ')[0]
    elif finding.rule == 'over budget':
        message = message.split()[0]
    elif finding.rule in _OF_THE_STEP:
        message = ''
    return finding.level, finding.rule, message


def _changed_rows(before: Inspection, after: Inspection) -> Iterator[ChangedRow]:
    old, new = ({(x.site, x.phase, x.axis): x for x in each.rows} for each in (before, after))
    for key in dict.fromkeys([*old, *new]):
        rows = [[each[key]] if key in each else [] for each in (old, new)]
        placed_before, placed_after = (
            [transfer for row in each for transfer in row.placed] for each in rows
        )
        if Counter(placed_before) != Counter(placed_after):
            sent = Change('sent', 'B', *map(_sent, rows))
            is_more = any(row.verdict == 'MORE' for row in rows[1])
            yield ChangedRow(*key, placed_before, placed_after, sent, is_more)


def _sent(rows: list[Row]) -> float:
    return sum(row.wire_bytes for row in rows)


def _large(changes: list[Change]) -> list[Change]:
    """Return the changes larger than LEAST times the sum of all numbers with the same unit."""
    whole = defaultdict[str, float](float)
    for change in changes:
        whole[change.unit] += change.before
    return [
        change
        for change in changes
        if abs(change.after - change.before) > LEAST * whole[change.unit]
    ]


def _of_program(inspection: Inspection) -> dict[str, Any]:
    names = 'target', 'jax_version', 'devices_per_host', 'scan'
    return {name: getattr(inspection, name) for name in names}


def _flat(values: Any, key: str = '') -> dict[str, Any]:
    """Return nested values as a flat dict with dotted keys."""
    if not isinstance(values, dict) or not values:
        return {key: values}
    parts = (_flat(value, f'{key}.{name}' if key else name) for name, value in values.items())
    return {name: value for part in parts for name, value in part.items()}


def _differing(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*before, *after]):
        values = (str(each.get(name, '-')) for each in (before, after))
        old, new = values
        if old != new:
            yield name, old, new


def _changes(
    before: Inspection,
    after: Inspection,
    numbers: Callable[[Inspection], Iterator[tuple[str, str, float]]],
) -> Iterator[Change]:
    """Yield the numbers of both inspections: the numbers in `before` in order, then the rest."""
    old, new = (
        {(name, unit): value for name, unit, value in numbers(each)} for each in (before, after)
    )
    for name, unit in dict.fromkeys([*old, *new]):
        yield Change(name, unit, old.get((name, unit), 0.0), new.get((name, unit), 0.0))


def _totals(inspection: Inspection) -> Iterator[tuple[str, str, float]]:
    """Yield the numbers of a step on one device, with their units."""
    whole, memory = total(inspection.kernels), inspection.memory
    if inspection.kernels:
        assert inspection.compute_seconds is not None
        assert inspection.exposed_seconds is not None
        yield 'kernels', 'ms', 1e3 * inspection.compute_seconds
        yield 'exposed communication', 'ms', 1e3 * inspection.exposed_seconds
        yield 'read and written', 'B', whole.bytes
        yield 'launches', '', whole.launches
    yield 'matmul work', 'TFLOP', inspection.products.compiled / 1e12
    for axis in inspection.mesh:
        yield f'sent over {axis}', 'B', inspection.sent_over(axis)
    yield 'memory', 'B', memory.needed
    yield 'state and batch', 'B', memory.arguments
    yield 'temporaries', 'B', memory.temporaries


def _parts(inspection: Inspection) -> Iterator[tuple[str, str, float]]:
    """Yield the bytes that each site sends, and the milliseconds of hidden time and kernels."""
    for row in inspection.rows:
        yield f'{row.site} {row.phase} over {row.axis or "-"}', 'B', row.wire_bytes
    for axis, seconds in inspection.hidden_seconds.items():
        yield f'hidden over {axis}', 'ms', 1e3 * seconds
    groups = totals(inspection.kernels, lambda kernel: (kernel.kind, kernel.site, kernel.phase))
    for key, group in groups.items():
        yield ' '.join(key), 'ms', 1e3 * group.seconds


def _memory(inspection: Inspection) -> Iterator[tuple[str, str, float]]:
    """Yield the memory of a device at the peak, by use."""
    for (use,), arrays in grouped(inspection.memory.at_peak, lambda each: (each.use,)).items():
        yield use, 'B', total_bytes(arrays)


def _arrays(inspection: Inspection) -> Iterator[tuple[str, str, float]]:
    """Yield the memory at the peak by use, part of the step and file."""
    for key, arrays in grouped(inspection.memory.at_peak, by_file).items():
        yield ' '.join(name for name in key if name != '-'), 'B', total_bytes(arrays)
