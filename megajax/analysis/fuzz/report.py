"""Render random steps: their configs, their findings and the summary."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from megajax.analysis.fuzz.case import Case, Worst
from megajax.analysis.fuzz.draw import described
from megajax.base.render.console import open_table
from megajax.core.config import Config
from megajax.xla.emulate.result import NOT_COVERED, culprit_line


def line(case: Case) -> str:
    """Return one line on a case: its number, verdict, worst result and time."""
    found = [_worst(worst) for worst in (case.as_compiled, case.exact) if worst is not None]
    said = case.message.strip().splitlines()[-1:] or found[:1]
    if case.verdict == 'wrong':
        said = [_worst(worst) for worst in (case.as_compiled, case.exact) if worst and worst.wrong]
    return f'{case.number}  {case.verdict}  {"; ".join(said)}  ({case.seconds:.0f} s)'


def tables(cases: Sequence[Case], executed: int, file: Path) -> RenderableType:
    """Return tables of the findings and of the number of cases with each verdict.

    `executed` of the cases are new, and the others come from `file`.
    """
    first = cases[0]
    table = open_table('verdict', 'cases')
    for verdict in ('right', 'wrong', 'failed', 'rejected'):
        table.add_row(verdict, f'{sum(case.verdict == verdict for case in cases):,}')
    table.add_row('total', f'{len(cases):,}')
    findings = [part for case in cases if case.is_finding for part in _finding(case)]
    cpu = statistics.median(case.cpu_seconds for case in cases)
    head = f'seed {first.seed}, target {first.target}, jax {first.jax_version}'
    return Group(
        Text(f'{head}; {cpu:.1f} CPU seconds per case (median)'),
        Text(f'{executed:,} executed, {len(cases) - executed:,} from {file}'),
        Text(),
        *findings,
        table,
        Text(NOT_COVERED, style='dim'),
    )


def _finding(case: Case) -> list[Text]:
    config = Config.model_validate(case.config, strict=False)
    texts = [Text(line(case), style='bold red'), Text(f'  {described(config)}')]
    if case.culprit:
        texts.append(Text(f'  {culprit_line(case.culprit, "compiler pass ")}'))
    if case.smallest:
        texts.append(Text(f'  smallest wrong config: {case.smallest}'))
    return [*texts, Text()]


def _worst(worst: Worst) -> str:
    error = 'not a number' if worst.error is None else f'{worst.error:.1e}'
    return f'{worst.name} {error} (limit {worst.limit:.1e})'
