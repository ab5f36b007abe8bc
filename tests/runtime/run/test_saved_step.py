"""A run keeps the step that it has compiled, as `inspect` would see it."""

import contextlib
import logging
from pathlib import Path

import jax
import pytest
from jax.stages import Compiled
from steps import compiled_step
from support import make_config

from megajax.analysis.inspect.audit import audit
from megajax.core.parallel.mesh import make_mesh
from megajax.core.train.compiled_step import CompiledStep, record_step
from megajax.core.train.step import TrainState
from megajax.runtime.run.saved_step import (
    PROGRAM,
    RECORD,
    compressed,
    decompressed,
    keep_step,
    read_step,
)

CONFIG = make_config('llama', 2, 2)


@pytest.fixture
def step() -> tuple[Compiled, TrainState]:
    return compiled_step(CONFIG)


def recorded(step: tuple[Compiled, TrainState]) -> CompiledStep:
    return record_step(*step, make_mesh(2, 2), devices_per_host=4, seconds=1.5)


def test_what_is_read_is_what_was_kept(step: tuple[Compiled, TrainState], tmp_path: Path) -> None:
    with jax.set_mesh(make_mesh(2, 2)):
        keep_step(tmp_path, CONFIG, *step, seconds=1.5)
    kept = read_step(tmp_path)
    assert kept is not None
    assert kept.compiled == recorded(step)
    assert (kept.device_kind, kept.target, kept.config) == ('cpu', 'cpu', CONFIG)
    before, after = (audit(CONFIG, each, 'cpu') for each in (recorded(step), kept.compiled))
    assert before == after
    assert (tmp_path / RECORD).stat().st_size < 20_000
    assert (tmp_path / PROGRAM).stat().st_size < len(kept.compiled.text) / 4


def test_a_step_that_cannot_be_written_ends_no_run(
    step: tuple[Compiled, TrainState], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), jax.set_mesh(make_mesh(2, 2)):
        keep_step(tmp_path / 'nowhere', CONFIG, *step, seconds=1.5)
    assert 'step.hlo.gz cannot be written' in caplog.text


def test_a_program_is_whole_or_a_value_error() -> None:
    content = compressed('HloModule a' * 100)
    assert decompressed(content) == 'HloModule a' * 100
    for place in range(1, len(content)):
        for damaged in (content[:place], content[:place] + b'\xff\xff\xff' + content[place:]):
            with contextlib.suppress(ValueError):
                assert decompressed(damaged) == 'HloModule a' * 100  # a changed name or time


def test_a_run_that_keeps_none_has_none(tmp_path: Path) -> None:
    assert read_step(tmp_path) is None
