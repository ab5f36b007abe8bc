"""Each second belongs to one activity, and a run directory keeps the sum over its starts."""

import json
import time
from pathlib import Path

import pytest

from megajax.runtime.run.clock import ACTIVITIES, Clock, RunSummary, describe


def test_the_activities_add_up_to_the_time_that_passed() -> None:
    before, clock, after = time.perf_counter(), Clock(), time.perf_counter()
    for activity in ('compile', 'data_wait', 'productive', 'other'):
        clock.begin(activity)
        time.sleep(0.02)
    least = time.perf_counter() - after
    total = clock.seconds()
    most = time.perf_counter() - before
    assert least <= total <= most
    assert (
        min(clock.seconds(activity) for activity in ('compile', 'data_wait', 'productive', 'other'))
        >= 0.02
    )
    assert clock.seconds('restore', 'evaluation') == 0


def test_what_is_lost_was_productive_and_is_no_more_than_that() -> None:
    clock = Clock()
    clock.begin('productive')
    time.sleep(0.02)
    clock.begin('other')
    productive = clock.seconds('productive')
    clock.lose(0.01)
    assert (clock.seconds('productive'), clock.seconds('lost')) == pytest.approx(
        (productive - 0.01, 0.01)
    )
    clock.lose(60)
    assert (clock.seconds('productive'), clock.seconds('lost')) == pytest.approx((0, productive))


def start(folder: Path, step: int, *, lost_seconds: float) -> RunSummary:
    summary = RunSummary(folder, Clock())
    summary.begin(step, lost_seconds=lost_seconds)
    return summary


def work(summary: RunSummary, seconds: float, *, until: int) -> dict[str, float]:
    summary.clock.begin('productive')
    time.sleep(seconds)
    summary.clock.begin('other')
    summary.step = until
    summary.write()
    return json.loads(summary.path.read_text())


def test_the_seconds_of_all_starts_are_summed_and_what_is_done_again_is_lost(
    tmp_path: Path,
) -> None:
    first = work(start(tmp_path, 0, lost_seconds=0), 0.05, until=7)
    assert (first['step'], first['starts']) == (7, 1)
    assert first['seconds'] == first['seconds_of_last_start']
    assert RunSummary(tmp_path, Clock()).last_step == 7
    second = work(start(tmp_path, 4, lost_seconds=0.03), 0.02, until=9)
    assert (second['step'], second['starts']) == (9, 2)
    both, last = second['seconds'], second['seconds_of_last_start']
    assert both['lost'] == 0.03
    assert both['productive'] == pytest.approx(
        first['seconds']['productive'] + last['productive'] - 0.03, abs=2e-3
    )
    assert both['total'] == pytest.approx(sum(both[activity] for activity in ACTIVITIES), abs=5e-3)
    assert both['total'] == pytest.approx(first['seconds']['total'] + last['total'], abs=2e-3)


def test_a_start_that_is_killed_at_once_counts_with_the_steps_that_it_repeats(
    tmp_path: Path,
) -> None:
    first = work(start(tmp_path, 0, lost_seconds=0), 0.05, until=7)
    start(tmp_path, 4, lost_seconds=0.03)  # killed before its first step
    third = work(start(tmp_path, 4, lost_seconds=0), 0, until=5)
    assert third['starts'] == 3
    assert third['seconds']['lost'] == 0.03
    assert third['seconds']['productive'] == pytest.approx(
        first['seconds']['productive'] + third['seconds_of_last_start']['productive'] - 0.03,
        abs=2e-3,
    )


def test_what_is_rolled_back_is_lost_in_the_file_too(tmp_path: Path) -> None:
    summary = start(tmp_path, 0, lost_seconds=0)
    work(summary, 0.05, until=7)
    summary.roll_back(4, lost_seconds=0.03)
    written = json.loads(summary.path.read_text())
    assert (written['step'], written['seconds']['lost']) == (4, 0.03)


@pytest.mark.parametrize('content', ['', '{"step": 3, "sta', '[]', '{"seconds": 3}', '[' * 100_000])
def test_a_summary_that_cannot_be_read_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / 'summary.json').write_text(content)
    assert work(start(tmp_path, 0, lost_seconds=1), 0, until=1)['starts'] == 1


def test_a_summary_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = start(tmp_path / 'gone', 0, lost_seconds=0)
    summary.write()
    summary.write()
    assert [record.getMessage() for record in caplog.records] == [
        'summary.json cannot be written (No such file or directory); the run continues'
    ]
    assert str(summary).startswith('seconds    0.0: 0.0 productive')


def test_the_line_names_what_matters_and_adds_up() -> None:
    seconds = dict.fromkeys(ACTIVITIES, 0.0) | {
        'productive': 9000.0,
        'lost': 400.0,
        'compile': 30.25,
        'evaluation': 20.0,
        'other': 550.0,
    }
    assert describe(seconds) == (
        '10,000: 9,000 productive (90%), 400 lost, 30.2 compile, 0.0 restore, 0.0 checkpoint, '
        '0.0 data wait, 570 other'
    )


def test_a_run_of_several_starts_has_a_line_for_all_of_them(tmp_path: Path) -> None:
    told = {'seconds': dict.fromkeys(ACTIVITIES, 123_456.0), 'starts': 2, 'step': 0}
    (tmp_path / 'summary.json').write_text(json.dumps(told))
    this, all_starts = str(start(tmp_path, 0, lost_seconds=0)).splitlines()
    assert [this[:11], all_starts[:11]] == ['seconds    ', '3 starts   ']
    assert all_starts[11:] == describe(told['seconds'])
