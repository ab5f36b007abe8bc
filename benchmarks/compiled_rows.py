"""Tables of compiled steps: CSV files that a script extends row by row, and columns that several
scripts have.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from megajax.analysis.inspect.result import Inspection

Step = tuple[str, list[str]]  # its name, and the words that its script reads


def steps_of(lines: str, only: str = '') -> list[Step]:
    """The steps in lines of `name | words` whose name contains `only`."""
    parts = (line.split('|') for line in lines.strip().splitlines())
    return [(name.strip(), words.split()) for name, words in parts if only in name]


def missing(path: Path, steps: Iterable[Step]) -> list[Step]:
    """The steps that the file does not have for this version of jax."""
    done = {(row['name'], row['jax']) for row in read(path)}
    return [step for step in steps if (step[0], jax.__version__) not in done]


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file, or none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def extend(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write each row as soon as it is computed, so that an interrupted run can continue."""
    with path.open('a', newline='') as file:
        writer = csv.DictWriter(file, columns)
        if not file.tell():
            writer.writeheader()
        for row in rows:
            writer.writerow(row)
            file.flush()


def num_findings(told: Inspection) -> int:
    """The number of errors, and of collectives that send more than Megatron's."""
    errors = sum(finding.level == 'error' for finding in told.findings)
    return errors + sum(row.verdict == 'MORE' for row in told.rows)


def sent_by_axis(told: Inspection) -> dict[str, float]:
    """The bytes that a device sends over each mesh axis, except for single numbers."""
    sent: dict[str, float] = {}
    for row in told.rows:
        if row.site != 'metrics':
            sent[row.axis] = sent.get(row.axis, 0.0) + row.wire_bytes
    return dict(sorted(sent.items()))
