"""Print a table of the random steps in files that `megajax inspect fuzz` wrote.

python benchmarks/fuzz_table.py benchmarks/results/*_fuzz.jsonl
"""

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.analysis.fuzz.case import Case
from megajax.analysis.fuzz.run import read, summary

VERDICTS = 'right', 'wrong', 'failed', 'rejected'
CPU = 'CPU s per step, median (range)'
HEADER = 'jax', 'target', 'seed', 'steps', *VERDICTS, CPU


def row(cases: Sequence[Case]) -> str:
    """Return a row of the table for cases of one seed, target and version of jax."""
    first, counts = cases[0], summary(cases)
    seconds = sorted(case.cpu_seconds for case in cases)
    cells = [first.jax_version, first.target, first.seed, len(cases)]
    cells += [counts.get(verdict, 0) for verdict in VERDICTS]
    cells.append(f'{statistics.median(seconds):.1f} ({seconds[0]} to {seconds[-1]})')
    return f'| {" | ".join(map(str, cells))} |'


def table(cases: Sequence[Case]) -> str:
    """Return a table in Markdown, with a row for each seed, target and version of jax."""
    kind = lambda case: (case.jax_version, case.target, case.seed)  # noqa: E731
    groups = itertools.groupby(sorted(cases, key=kind), kind)
    rows = [row([*group]) for _, group in groups]
    return '\n'.join([f'| {" | ".join(HEADER)} |', '|---' * len(HEADER) + '|', *rows])


if __name__ == '__main__':
    print(table([case for name in sys.argv[1:] for case in read(Path(name))]))
