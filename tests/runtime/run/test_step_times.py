"""The times of a step are its own: what happens beside it is not counted."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from counting import CONFIG, make_counting_step
from support import write_run

from megajax.core.config import load
from megajax.runtime.run import compile_step
from megajax.runtime.run.run import run


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[int, Any]:
    """Take the counting step; return the lines of its metrics by step."""
    monkeypatch.setattr(compile_step, 'make_train_step', make_counting_step)
    write_run(folder, CONFIG, split='1,0,0')
    lines = run(load(folder / 'small.yaml', [f'run.dir={folder}/run', *overrides]), name='a')
    return {line['step']: line for line in lines.metrics}


def seconds(folder: Path) -> dict[str, float]:
    return json.loads((folder / 'run/summary.json').read_text())['seconds']


def test_writing_the_trace_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_trace, export = jax.profiler.stop_trace, 2.0

    def stop() -> None:
        time.sleep(export)
        stop_trace()

    monkeypatch.setattr(jax.profiler, 'stop_trace', stop)
    lines = train(tmp_path, monkeypatch, 'train.profile={start: 3, steps: 2}')
    assert list((tmp_path / 'run/profile').rglob('*.xplane.pb'))
    assert max(line['step_ms'] for line in lines.values()) < 1e3 * export
    assert seconds(tmp_path)['productive'] < export
    assert seconds(tmp_path)['other'] > export
