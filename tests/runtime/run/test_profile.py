"""A resumed run traces the steps that are left, and says which are already done."""

import contextlib
import logging
import shlex
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from checkpoints import tiny
from support import make_config

from megajax.core.config import dump, load
from megajax.runtime.run import profile
from megajax.runtime.run.profile import FOLDER, Profiler, how_to_trace, options_for
from megajax.runtime.run.saved_step import PROGRAM


@pytest.mark.parametrize(
    ('done', 'traced', 'said'),
    [
        (0, [6, 7, 8], None),
        (5, [6, 7, 8], None),
        (6, [7, 8], 'step 6 is already done; the trace begins with step 7'),
        (7, [8], 'steps 6 to 7 are already done; the trace begins with step 8'),
        (8, [], 'steps 6 to 8 are already done; for others: RESUME {start: 9, steps: 3}'),
        (
            11,
            [],
            'steps 6 to 8 are already done; for others: RESUME {start: 11, steps: 1}',
        ),
    ],
)
def test_steps_that_are_done_are_named(
    done: int,
    traced: list[int],
    said: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny(train={'steps': 12, 'profile': {'start': 5, 'steps': 3}})
    profiler = Profiler(tmp_path, config, done=done)
    assert [step for step in range(1, 20) if profiler.covers(step)] == traced
    resumed = f"megajax train run.dir={tmp_path} 'train.profile="
    found = [message.replace(resumed, 'RESUME ').rstrip("'") for message in caplog.messages]
    assert found == ([f'train.profile: {said}'] if said else [])


@pytest.mark.parametrize('steps', [2, 12, 600])
@pytest.mark.parametrize('left', [0, 1, 2, 300])
def test_the_command_that_traces_steps_is_a_valid_config_with_steps_that_are_not_done(
    steps: int, left: int, tmp_path: Path
) -> None:
    config, done = make_config('llama', train={'steps': steps}), max(0, steps - left)
    (tmp_path / 'config.yaml').write_text(dump(config))
    command = how_to_trace(tmp_path, config, done=done).partition(', and')[0]
    words = shlex.split(command)[2:]
    keys = [word for word in words if '=' in word]
    found = load(tmp_path / 'config.yaml', keys)
    assert found.train.profile is not None
    is_resumed = found.run.dir == str(tmp_path)
    assert is_resumed == (done < steps)
    assert words[: -len(keys)] == ([] if is_resumed else [f'{tmp_path}/config.yaml'])
    profiler = Profiler(tmp_path, found, done=done if is_resumed else 0)
    assert [*filter(profiler.covers, range(1, steps + 1))]


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
