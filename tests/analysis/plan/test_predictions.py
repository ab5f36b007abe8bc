"""Published rates: efficiencies fitted on some rows predict the others."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from support import exhaustive, load_script, slow

from megajax.analysis.plan.published.comparison import COLUMNS, errors, markdown, summary_rows
from megajax.analysis.plan.published.predictions import Prediction, predict
from megajax.analysis.plan.published.tables import TABLES, rows
from megajax.core.hardware.records import hardware, hardware_names

script = load_script('fit_gpus')
rows_of = script.rows_of = functools.cache(script.rows_of)


@functools.cache
def every() -> list[Prediction]:
    """The predictions of every table."""
    return [one for table in TABLES for one in predict(table)]


def test_the_rows_that_are_held_out_are_predicted():
    mean, _, count = errors(every())
    assert count > 80
    assert mean < 0.08


STAGES = [(name, number) for name, stages in script.FITTED.items() for number in range(len(stages))]
IN_CI = ('a100', 0), ('hopper', 0), ('blackwell', 0)


@pytest.mark.parametrize('name', script.FITTED)
def test_a_file_has_the_errors_of_the_fit(name):
    found = script.residuals_of(name, script.start(name))
    file = hardware(script.OF_DIE.get(name, (name,))[0])
    assert (file.fit.mean, file.fit.band) == pytest.approx((found.mean, found.band), abs=1.1e-3)
    assert file.fit.programs.keys() == found.programs.keys()
    for program, seen in file.fit.programs.items():
        assert seen.model_copy(update={'band': 0}) == found.programs[program].model_copy(
            update={'band': 0}
        )
        assert seen.band == pytest.approx(found.programs[program].band, abs=1.1e-3)


@pytest.mark.parametrize(
    ('name', 'number'),
    [
        each if each[0] == 'v100' else slow(*each) if each in IN_CI else exhaustive(*each)
        for each in STAGES
    ],
)
def test_from_where_a_file_stands_there_is_nothing_to_gain(name, number):
    stage = script.FITTED[name][number]
    fitted = script.in_stage(rows_of(name), stage)
    better = script.fit_of_stage(script.start(name), fitted, stage)
    slowdown = fitted[0].program.slowdown
    errors = [
        script.mean_error(script.start(name), fitted, slowdown),
        script.mean_error(better.efficiency, fitted, better.slowdown),
    ]
    assert errors[0] < errors[1] + 2e-3


@pytest.mark.parametrize('name', script.FITTED)
def test_no_row_that_is_held_out_is_fitted(name):
    assert not any(row.held_out for row in rows_of(name))


@pytest.mark.parametrize('name', script.FITTED)
def test_three_numbers_at_most_are_fitted_of_a_gpu_and_four_of_a_die(name):
    names = {n for stage in script.FITTED[name] for n in stage.names} - {'slowdown'}
    assert len(names) <= (4 if name in script.OF_DIE else 3)


def test_a_gpu_without_a_fit_says_that_it_is_unverified():
    for name in hardware_names():
        if hardware(name).fit is None:
            assert 'unverified' in hardware(name).sources['efficiency']


def test_the_rate_with_fewer_heads_is_predicted_too():
    found = predict('heads')
    assert all(abs(one.error) < 0.08 for one in found)
    assert [one.tflops for one in found] == sorted((one.tflops for one in found), reverse=True)


@pytest.mark.parametrize('table', TABLES)
def test_a_document_has_a_line_for_each_row(table):
    lines = markdown(table).splitlines()
    assert sum(line.count('|') == len(COLUMNS) + 1 for line in lines) == 2 + len(rows(table))


def test_the_results_are_those_of_today():
    newest = max(Path(__file__).parents[3].glob('benchmarks/results/*_plan_tables.md'))
    text = newest.read_text()  # python benchmarks/plan_tables.py writes it
    for table in TABLES:
        assert markdown(table) in text
    for cells in summary_rows():
        assert '| ' + ' | '.join(cells) + ' |' in text
    tables = load_script('plan_tables')
    for line in (*tables.groups(), *tables.of_memory(), *tables.far()):
        assert line in text


@pytest.mark.parametrize('table', [slow('narayanan'), exhaustive('core')])
def test_the_published_mesh_is_the_fastest_or_within_three_percent_of_it(table: str) -> None:
    ranks = load_script('plan_ranks')
    for row in rows(table):
        fastest, slower = ranks.ranked(row)
        assert slower <= ranks.NEAR, (row.name, fastest)


def test_of_the_degrees_that_were_measured_the_plan_chooses_the_fastest() -> None:
    for name, measured, chosen, share in load_script('plan_ranks').swept():
        assert len(measured) > 1
        assert share > 0.97, (name, chosen)


def test_rates_beyond_the_peak_are_fitted_within_what_a_gpu_can_be() -> None:
    start = script.start('v100')
    beyond = [replace(row, published=1e6) for row in rows_of('v100')[:2]]
    assert script.fit(start, beyond, ['matmul', 'half_size']).efficiency.matmul <= 1
    assert script.fit(start, beyond, ['half_size']).efficiency.half_size >= 0
