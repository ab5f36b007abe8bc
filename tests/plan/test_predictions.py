"""The papers' tables: efficiencies fitted on half of the rows predict the other half, either way round."""

from pathlib import Path

import pytest

from megajax.config.hardware import hardware
from megajax.plan.predictions import TABLES, fit, predict, rows
from megajax.plan.tables import COLUMNS, errors, markdown

FITTED = 'scaling', 'narayanan'


@pytest.mark.parametrize('table', FITTED)
def test_the_rows_that_were_not_fitted_are_predicted(table):
    mean, largest, held_out = errors(predict(table))
    assert held_out == len(rows(table)) // 2
    assert mean < 0.08
    assert largest < 0.15


@pytest.mark.parametrize('table', FITTED)
def test_the_efficiencies_of_the_hardware_are_those_of_the_fit(table):
    assert fit(table) == hardware(TABLES[table][1]).efficiency


@pytest.mark.parametrize('table', FITTED)
def test_the_other_half_predicts_the_first(table):
    found = [abs(one.error) for one in predict(table, fit(table, on_fitted=False)) if one.row.fitted]
    assert sum(found) / len(found) < 0.08
    assert max(found) < 0.15


def test_the_rate_with_fewer_heads_is_predicted_too():
    found = predict('heads')
    assert all(abs(one.error) < 0.08 for one in found)
    assert [one.tflops for one in found] == sorted((one.tflops for one in found), reverse=True)


@pytest.mark.parametrize('table', TABLES)
def test_the_results_are_those_of_today(table):
    results = Path(__file__).parents[2] / 'benchmarks/results/2026-11-21_plan_tables.md'
    assert markdown(table) in results.read_text()  # python benchmarks/plan_tables.py writes it


@pytest.mark.parametrize('table', TABLES)
def test_a_document_has_a_line_for_each_row(table):
    lines = markdown(table).splitlines()
    assert sum(line.count('|') == len(COLUMNS) + 1 for line in lines) == 2 + len(rows(table))
