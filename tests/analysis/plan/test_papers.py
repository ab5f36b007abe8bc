"""What no efficiency is fitted on is set by a rule, and by nobody."""

from collections import Counter

import pytest
from support import load_script

script = load_script('held_out')
TABLES = sorted(path.stem for path in script.PAPERS.glob('*.csv'))


@pytest.mark.parametrize('table', TABLES)
def test_the_rule_says_what_is_held_out(table: str) -> None:
    _, rows = script.read(script.PAPERS / f'{table}.csv')
    assert [row['held_out'] == 'yes' for row in rows] == script.held_out(table, rows)


@pytest.mark.parametrize('table', sorted({*TABLES} - script.FOR_TESTS_ONLY))
def test_half_of_each_table_is_held_out_and_at_least_a_row(table: str) -> None:
    _, rows = script.read(script.PAPERS / f'{table}.csv')
    counts = Counter(row['held_out'] for row in rows)
    assert counts['yes'] - counts['no'] in (0, 1)


def test_a_row_of_the_table_for_tests_is_always_held_out() -> None:
    for table in script.FOR_TESTS_ONLY:
        _, rows = script.read(script.PAPERS / f'{table}.csv')
        assert {row['held_out'] for row in rows} == {'yes'}


def test_the_choice_does_not_follow_from_a_choice_before() -> None:
    rows = [{'rate': str(rate), 'fitted': 'yes'} for rate in range(40)]
    others = [{'rate': row['rate'], 'fitted': 'no', 'held_out': 'no'} for row in rows]
    assert script.held_out('a table', rows) == script.held_out('a table', others)
