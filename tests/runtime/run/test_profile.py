"""A resumed run traces the steps that are left, and says which are already done."""

import contextlib
import logging
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from checkpoints import tiny

from megajax.runtime.run import profile
from megajax.runtime.run.profile import FOLDER, Profiler, options_for
from megajax.runtime.run.saved_step import PROGRAM


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


def test_the_trace_of_a_gpu_may_have_more_events_than_xla_keeps_by_default() -> None:
    h100 = SimpleNamespace(platform='gpu', device_kind='NVIDIA H100 80GB HBM3')
    (limit,) = options_for(h100).advanced_configuration.values()
    assert limit > 2 * 1024 * 1024
    assert options_for(jax.devices()[0]).advanced_configuration == {}


@pytest.mark.parametrize('fails', [False, True])
def test_no_process_begins_a_traced_step_before_the_program_is_written(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def start_trace(folder: Path, profiler_options: jax.profiler.ProfileOptions) -> None:
        seen.append('start')
        if fails:
            raise RuntimeError('there is a trace already')

    def all_are_here(where: str, seconds: float) -> bool:
        seen.append(f'{where}, {(tmp_path / FOLDER / PROGRAM).exists()}')
        return True

    class Annotation(contextlib.nullcontext):
        def __init__(self, name: str, step_num: int):
            seen.append(f'step {step_num}')
            super().__init__()

    monkeypatch.setattr(jax.profiler, 'start_trace', start_trace)
    monkeypatch.setattr(jax.profiler, 'StepTraceAnnotation', Annotation)
    monkeypatch.setattr(profile, 'all_are_here', all_are_here)
    profiler = Profiler(tmp_path, tiny(train={'profile': {'start': 5, 'steps': 3}}))
    profiler.compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    for step in (5, 6, 7):
        with profiler.step(step):
            pass
    # also a process that cannot trace: the others would wait for it
    assert seen == ['start', 'trace, True', *([] if fails else ['step 6', 'step 7'])]
