"""The README's table of ratios is that of the measured file, and the file keeps the promise."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [*csv.DictReader((ROOT / 'benchmarks/results/2026-11-21_collectives.csv').open(newline=''))]


def test_no_step_sends_more_than_megatron():
    for row in ROWS:
        assert max(float(ratio) for ratio in (row['model_ratio'], row['data_ratio']) if ratio) <= 1, row
        assert not row['more'], row
        assert not row['errors'], row


@pytest.mark.parametrize('preset', sorted({row['preset'] for row in ROWS}))
def test_the_readme_has_the_largest_ratios(preset):
    rows = [row for row in ROWS if row['preset'] == preset]

    def largest(key: str, *layouts: str) -> str:
        return f'{max(float(row[key]) for row in rows if row["sequence_parallel"] in layouts and row[key]):.3f}'

    columns = largest('model_ratio', 'False'), largest('model_ratio', 'True'), largest('data_ratio', 'False', 'True')
    assert f'| {preset} | {len(rows)} | {" | ".join(columns)} |' in (ROOT / 'README.md').read_text()
