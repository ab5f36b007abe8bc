"""The lines of a report's charts."""

from pathlib import Path

from analysis.report.small_runs import facts_of

from megajax.analysis.report.run_facts import lines_of


def test_a_line_has_a_columns_value_at_each_step(tmp_path: Path) -> None:
    lines = [{'step': n, 'loss': 1.0, 'step_ms': ms} for n, ms in ((3, 20.0), (4, 30.0))]
    facts = facts_of(tmp_path, *lines)
    (line,) = lines_of([facts], 'step_ms', 100)
    assert [*line.curve.x] == [3, 4]
    assert [*line.curve.y] == [20, 30]
