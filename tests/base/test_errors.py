"""Problems keep what they say while their places and paths are changed."""

import pytest

from megajax.base.errors import ConfigError, Problem, problems_at, replacing


def test_the_path_of_a_copy_is_replaced_in_all_that_is_said() -> None:
    problem = Problem('/copy/a', 'cannot read /copy/b', place='/copy/c:1')
    with pytest.raises(ConfigError) as raised, replacing('/copy', 's3://web'):
        raise ConfigError(problem, 'other text of /copy')
    (changed, text) = raised.value.problems
    assert isinstance(changed, Problem)
    assert (changed.path, changed.message) == ('s3://web/a', 'cannot read s3://web/b')
    assert changed.place == 's3://web/c:1'
    assert text == 'other text of /copy'


def test_a_problem_keeps_its_own_place() -> None:
    problems = Problem('a', 'is wrong', place='file:1'), Problem('b', 'is wrong')
    with pytest.raises(ConfigError) as raised, problems_at('file:9'):
        raise ConfigError(*problems)
    assert [each.place for each in raised.value.problems] == ['file:1', 'file:9']
