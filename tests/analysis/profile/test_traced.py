"""Which traced steps count, and which traces belong to the program stored with them."""

from pathlib import Path

import pytest
from analysis.profile.gpu_run import FIRST, PROGRAM, SECOND, Ran, write_gpu_run

from megajax.analysis.profile import profile
from megajax.analysis.profile.report import tables
from megajax.base.render.console import as_text
from megajax.core.config import ConfigError, dump, load
from megajax.runtime.checkpoint.digests import COMMIT

REPLAYED = 'train.deterministic=true', 'train.replay_every=12'


def later(ran: list[Ran], microseconds: int) -> list[Ran]:
    return [(name, start + microseconds, end + microseconds) for name, start, end in ran]


def test_a_step_that_a_run_repeats_does_not_count(tmp_path: Path) -> None:
    devices = [[*ran, *later(ran, 100), *later(ran, 115)] for ran in (FIRST, SECOND)]
    result = profile(write_gpu_run(tmp_path / 'run', [devices], *REPLAYED, steps=(11, 12)))
    assert result.steps == [11]
    assert [line.launches for line in result.instructions] == [1, 1, 1]
    note = 'step 12 does not count: train.replay_every=12 repeats it'
    assert note in as_text(tables(result, top=9))


@pytest.mark.parametrize(
    ('done', 'fix'),
    [
        (None, "run.dir={run} 'train.profile={{start: 10, steps: 3}}'"),
        (300, "run.dir={run} 'train.profile={{start: 310, steps: 3}}'"),
        (600, "{run}/config.yaml run.dir={run}_traced 'train.profile={{start: 10, steps: 3}}'"),
    ],
)
def test_a_run_without_a_trace_says_how_to_record_one_from_where_it_is(
    done: int | None, fix: str, tmp_path: Path
) -> None:
    run = tmp_path / 'run'
    run.mkdir()
    (run / 'config.yaml').write_text(dump(load('tiny', ['train.steps=600'])))
    if done is not None:
        (run / f'checkpoints/{done}').mkdir(parents=True)
        (run / f'checkpoints/{done}' / COMMIT).touch()
    with pytest.raises(ConfigError) as raised:
        profile(run)
    assert f'; to record one: megajax train {fix.format(run=run)}' in str(raised.value)


def test_a_trace_without_an_event_of_the_program_is_a_mistake(tmp_path: Path) -> None:
    program = PROGRAM.replace('jit_train_step', 'jit_another')
    run = write_gpu_run(tmp_path / 'run', [[FIRST, SECOND]], program=program)
    with pytest.raises(ConfigError, match='they have no event of jit_another; trace some steps'):
        profile(run)


@pytest.mark.parametrize(
    ('overrides', 'step', 'fix'),
    [
        (REPLAYED, 12, "as with 'train.profile={start: 12, steps: 2}'"),
        ((*REPLAYED, 'train.replay_every=1'), 11, 'with train.replay_every=0'),
        (('train.dtype=float16',), 1, "as with 'train.profile={start: 1, steps: 2}'"),
    ],
)
def test_a_trace_of_repeated_steps_alone_is_a_mistake_with_a_fix(
    overrides: tuple[str, ...], step: int, fix: str, tmp_path: Path
) -> None:
    run = write_gpu_run(tmp_path / 'run', [[FIRST, SECOND]], *overrides, steps=(step,))
    with pytest.raises(ConfigError) as raised:
        profile(run)
    assert f'step {step} does not count' in str(raised.value)
    assert str(raised.value).endswith(fix)
