"""A resumed run traces the steps that are left, and says which are already done."""

import logging
from pathlib import Path

import pytest
from checkpoints import tiny

from megajax.runtime.run.profile import FOLDER, Profiler


@pytest.mark.parametrize(
    ('done', 'traced', 'said'),
    [
        (0, [6, 7, 8], None),
        (5, [6, 7, 8], None),
        (6, [7, 8], 'step 6 is already done; the trace begins with step 7'),
        (7, [8], 'steps 6 to 7 are already done; the trace begins with step 8'),
        (8, [], 'steps 6 to 8 are already done; use start=8 or more'),
        (11, [], 'steps 6 to 8 are already done; use start=11 or more'),
    ],
)
def test_steps_that_are_done_are_named(
    done: int,
    traced: list[int],
    said: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny(train={'profile': {'start': 5, 'steps': 3}})
    profiler = Profiler(tmp_path, config, done=done)
    assert [step for step in range(1, 20) if profiler.covers(step)] == traced
    assert caplog.messages == ([f'train.profile: {said}'] if said else [])


def test_where_there_is_a_trace_it_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).mkdir()
    with caplog.at_level(logging.INFO):
        Profiler(tmp_path, tiny(train={'profile': {'start': 5, 'steps': 3}}), done=8)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
