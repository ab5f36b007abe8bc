"""Which rows of the papers' tables no efficiency is fitted on: `python benchmarks/held_out.py`
writes it into each table.

The rows of a table, as they were published, stand in the order of their SHA-256. Every second one
from the first is held out, and all of a table that is for tests only, so that nobody has a choice.
"""

import csv
import hashlib
from pathlib import Path

PAPERS = Path(__file__).parents[1] / 'megajax/analysis/plan/published/papers'
FOR_TESTS_ONLY = {'megatron_core_h100', 'narayanan_2021_pipeline'}
OURS = 'fitted', 'held_out'  # columns that no paper has


def held_out(table: str, rows: list[dict[str, str]]) -> list[bool]:
    """Of each row of a table whether it is held out."""
    published = [','.join(value for name, value in row.items() if name not in OURS) for row in rows]
    in_order = sorted(published, key=lambda line: hashlib.sha256(line.encode()).digest())
    return [table in FOR_TESTS_ONLY or line in in_order[::2] for line in published]


def read(path: Path) -> tuple[str, list[dict[str, str]]]:
    """The comment and the rows of a table."""
    comment, *lines = path.read_text(encoding='utf-8').splitlines()
    return comment, list(csv.DictReader(lines))


def write(path: Path) -> None:
    """Set the column `held_out` of a table."""
    comment, rows = read(path)
    marks = held_out(path.stem, rows)
    rows = [
        {**row, 'held_out': 'yes' if mark else 'no'} for row, mark in zip(rows, marks, strict=True)
    ]
    lines = [','.join(line) for line in (rows[0], *(row.values() for row in rows))]
    path.write_text('\n'.join([comment, *lines, '']), encoding='utf-8')


if __name__ == '__main__':
    for table in sorted(PAPERS.glob('*.csv')):
        write(table)
