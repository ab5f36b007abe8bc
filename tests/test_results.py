"""The README's tables of ratios and overlap are the measured files', and keep its promises."""

import csv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [*csv.DictReader((ROOT / 'benchmarks/results/2026-11-22_collectives.csv').open(newline=''))]

OVERLAP = [*csv.DictReader((ROOT / 'benchmarks/results/2026-11-22_overlap.csv').open(newline=''))]


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


@pytest.mark.parametrize(('default', 'overlap'), [*zip(OVERLAP[::2], OVERLAP[1::2], strict=True)])
def test_the_readme_has_the_shares_of_overlap(default, overlap):
    names = 'preset', 'sequence_parallel', 'recompute'
    assert [default[name] for name in names] == [overlap[name] for name in names]
    assert (default['xla'], overlap['xla']) == ('default', 'overlap')

    def cell(row: dict[str, str]) -> str:
        share, hidden = float(row['share']), float(row['hidden'])
        return f'{share:.0%}, {hidden:.0%} ({int(row["temporaries"]) / 1e9:.1f} GB)'

    layout = 'TP + SP' if default['sequence_parallel'] == 'True' else 'TP'
    names = default['preset'], layout, default['recompute']
    cells = *names, cell(default), cell(overlap)
    assert f'| {" | ".join(cells)} |' in (ROOT / 'README.md').read_text()


def test_products_hide_no_more_than_what_they_run_beside():
    for row in OVERLAP:
        assert float(row['hidden']) <= float(row['share']) + 1e-4
        assert float(row['hidden_ms']) == pytest.approx(float(row['hidden']) * float(row['wire_ms']), abs=0.01)


def test_no_step_computes_a_product_twice():
    for row in OVERLAP:
        assert float(row['products']) == pytest.approx(1, abs=1e-3)
        assert not row['errors']
