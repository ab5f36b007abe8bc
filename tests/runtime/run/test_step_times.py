"""The times of a step are its own: what happens beside it is not counted."""

import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from counting import CONFIG, count_tokens, make_counting_step
from support import write_run

from megajax.analysis.profile.trace import read_trace
from megajax.core.config import load
from megajax.core.train.first_step import Calibration
from megajax.core.train.step import TrainState
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.orbax_manager import Manager
from megajax.runtime.data import Batches
from megajax.runtime.run import replay, trainer
from megajax.runtime.run.clock import Clock
from megajax.runtime.run.replay import Replay
from megajax.runtime.run.run import run
from megajax.runtime.run.step_times import Dispatched, StepTimes, noting_end
from megajax.runtime.run.watchdog import Watchdog


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[int, Any]:
    """Take the counting step; return the lines of its metrics by step."""
    count_tokens(monkeypatch)
    write_run(folder, CONFIG, split='1,0,0')
    lines = run(load(folder / 'small.yaml', [f'run.dir={folder}/run', *overrides]), name='a')
    return {line['step']: line for line in lines.metrics}


def seconds(folder: Path) -> dict[str, float]:
    return json.loads((folder / 'run/summary.json').read_text())['seconds']


LONG = 100.0  # seconds, which no step of a test takes


@pytest.fixture
def let_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let LONG pass, at once, by the clock that steps are timed with."""
    now, passed = time.perf_counter, list[float]()
    monkeypatch.setattr(time, 'perf_counter', lambda: now() + sum(passed))
    return lambda: passed.append(LONG)


def test_a_step_waits_for_its_own_batch_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    rows, beat, late = Batches.rows, Watchdog.beat, 5
    waits, notes = list[str](), queue.SimpleQueue[list[float]]()

    def read(batches: Batches, number: int, first: int, last: int) -> Any:
        batch = rows(batches, number, first, last)
        if number == late - 1:
            ends, limit = notes.get(timeout=60), time.monotonic() + 60
            while not ends and time.monotonic() < limit:  # until the step before has ended
                time.sleep(0.01)
            let_pass()
        return batch

    def noted(watchdog: Watchdog, phase: str, *kind: str) -> None:
        beat(watchdog, phase, *kind)
        if phase == 'data':
            waits.append(phase)

    @contextmanager
    def noting(metrics: Any) -> Iterator[list[float]]:
        with noting_end(metrics) as ends:
            if metrics is not None and len(waits) == late:
                notes.put(ends)
            yield ends

    monkeypatch.setattr(Batches, 'rows', read)
    monkeypatch.setattr(Watchdog, 'beat', noted)
    monkeypatch.setattr(trainer, 'noting_end', noting)
    lines = train(tmp_path, monkeypatch, 'checkpoint.every=100')
    waited = {step: line['data_wait_ms'] for step, line in lines.items()}
    assert waited.pop(late) > 1e3 * LONG
    assert max(waited.values()) < 1e3 * LONG
    slow = [step for step, line in lines.items() if line['step_ms'] > 1e3 * LONG]
    assert slow == [late]
    assert seconds(tmp_path)['data_wait'] > LONG


def clock_with(monkeypatch: pytest.MonkeyPatch, **durations: float) -> Clock:
    now = [0.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
    clock = Clock()
    for activity, duration in durations.items():
        clock.begin(activity)
        now[0] += duration
    clock.begin('other')
    return clock


def test_devices_that_compute_do_not_wait_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_with(monkeypatch, data_wait=3.15)
    # A batch every 1.05 s and steps of 1 s. While a step runs, the host waits for the next batch.
    first, second, third, fourth = (
        Dispatched(1, {}, 0.0, 0.0),
        Dispatched(2, {}, 0.0, 1.05, 0.0, 1.0),
        Dispatched(3, {}, 1.05, 2.1, 0.0, 2.05),
        Dispatched(4, {}, 2.1, 3.15, 0.0, 3.1),
    )
    times = StepTimes(clock)
    assert times.complete(first, 1.06, second, taken=True) == pytest.approx((1.0, 0.0))
    assert times.complete(second, 2.11, third, taken=True) == pytest.approx((1.05, 0.05))
    assert times.complete(third, 3.16, fourth, taken=True) == pytest.approx((1.05, 0.05))
    assert clock.seconds('data_wait') == pytest.approx(0.15)
    assert clock.seconds('productive') == pytest.approx(3.0)


def test_a_batch_that_comes_during_a_step_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_with(monkeypatch, data_wait=0.2, productive=1.8)
    times = StepTimes(clock)
    first, second = Dispatched(1, {}, 0.0, 0.0), Dispatched(2, {}, 0.0, 0.2)
    assert times.complete(first, 1.0, second, taken=True) == pytest.approx((1.0, 0.0))
    assert clock.seconds('data_wait') == 0
    assert times.complete(second, 2.0, None, taken=False) == pytest.approx((1.0, 0.0))
    assert (clock.seconds('productive'), clock.seconds('lost')) == pytest.approx((1.0, 1.0))


def test_the_time_between_a_step_and_the_wait_for_the_next_batch_is_no_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = clock_with(monkeypatch, data_wait=0.2, productive=1.0, checkpoint=0.5)
    first, second = Dispatched(1, {}, 0.0, 0.0), Dispatched(2, {}, 1.5, 1.7)
    assert StepTimes(clock).complete(first, 1.0, second, taken=True) == pytest.approx((1.0, 0.0))
    assert clock.seconds('data_wait', 'productive') == pytest.approx(1.2)
    assert clock.seconds('data_wait') == pytest.approx(0.2)


class Loss:
    """A loss that is ready a tenth of a second from now."""

    def __init__(self) -> None:
        self.end = time.perf_counter() + 0.1

    def is_ready(self) -> bool:
        return time.perf_counter() >= self.end


def test_the_end_of_a_step_is_noted_if_it_comes_before_the_batch() -> None:
    loss = Loss()
    with noting_end({'loss': loss}) as ends:
        assert not ends
        while not ends and time.perf_counter() < loss.end + 10:
            time.sleep(0.01)
    assert loss.end <= ends[0] < loss.end + 0.3
    with noting_end({'loss': Loss()}) as ends:
        pass
    assert ends == []
    with noting_end(None) as ends:
        pass
    assert ends == []


def test_the_replay_of_a_step_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    compare = Replay._compare

    def slow(*given: Any) -> None:
        let_pass()
        compare(*given)

    monkeypatch.setattr(replay, 'make_train_step', make_counting_step)
    monkeypatch.setattr(Replay, '_compare', slow)
    keys = 'train.replay_every=4', 'train.deterministic=true', 'checkpoint.every=100'
    lines = train(tmp_path, monkeypatch, *keys)
    assert [step for step, line in lines.items() if 'replay_ms' in line] == [4, 8]
    assert lines[4]['replay_ms'] > 1e3 * LONG
    tokens = 2 * 16
    for line in lines.values():
        assert line['step_ms'] < 1e3 * LONG
        assert line['tokens_per_s'] == pytest.approx(1e3 * tokens / line['step_ms'])
    assert seconds(tmp_path)['replay'] > 2 * LONG


def test_what_is_lost_of_a_repeated_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_with(monkeypatch, productive=2.0, replay=3.0)
    step = Dispatched(1, {}, 0.0, 0.0, 3.0)
    assert StepTimes(clock).complete(step, 4.0, None, taken=False) == pytest.approx((1.0, 0.0))
    assert (clock.seconds('productive'), clock.seconds('replay')) == pytest.approx((1.0, 3.0))


def test_the_first_step_which_waits_for_other_processes_hardly_raises_the_limit_of_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = list[float]()
    monkeypatch.setattr(Watchdog, 'allow', lambda _, kind, seconds: allowed.append(seconds))
    lines = train(tmp_path, monkeypatch, 'checkpoint.every=100')
    taken = [1e-3 * line['step_ms'] for line in lines.values()]
    factors = [limit / seconds for limit, seconds in zip(allowed, taken, strict=True)]
    assert factors == pytest.approx([2.0] + [10.0] * (len(taken) - 1))


def test_processes_that_ask_each_other_about_a_save_wait_for_the_step_in_flight_which_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    beat, phases = Watchdog.beat, ['']
    asked = list[tuple[int, str]]()

    def poll(_: Checkpoints, step: int, on_end: Any) -> None:
        """The answers come when the step ends."""
        asked.append((step, phases[-1]))
        let_pass()

    def noted(watchdog: Watchdog, phase: str, *kind: str) -> None:
        phases.append(phase)
        beat(watchdog, phase, *kind)

    monkeypatch.setattr(Checkpoints, 'poll', poll)
    monkeypatch.setattr(Watchdog, 'beat', noted)
    lines = train(tmp_path, monkeypatch)
    assert asked == [(step, f'step {step}') for step in lines]
    assert seconds(tmp_path)['productive'] > LONG * len(lines)
    assert seconds(tmp_path)['other'] < LONG


def test_the_end_of_a_save_is_no_part_of_a_step_and_has_the_limit_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    settle, beat, begun, kinds = Checkpoints._settle, Watchdog.beat, [''], list[str]()

    def slow(checkpoints: Checkpoints, *error: Any) -> None:
        if checkpoints._saving:
            kinds.append(begun[-1])
            let_pass()
        settle(checkpoints, *error)

    def noted(watchdog: Watchdog, phase: str, kind: str) -> None:
        begun.append(kind)
        beat(watchdog, phase, kind)

    monkeypatch.setattr(Checkpoints, '_settle', slow)
    monkeypatch.setattr(Manager, 'is_saving_in_progress', lambda _: False)
    monkeypatch.setattr(Watchdog, 'beat', noted)
    lines = train(tmp_path, monkeypatch, 'checkpoint.every=1', 'train.steps=4')
    assert set(kinds) == {'checkpoint'}
    assert len(kinds) == len(lines)
    assert seconds(tmp_path)['checkpoint'] > LONG * len(lines)
    assert seconds(tmp_path)['productive'] < LONG
    later = [line['step_ms'] for step, line in lines.items() if step > 1]
    assert max(later) < 1e3 * LONG


def test_writing_the_trace_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    stop_trace = jax.profiler.stop_trace

    def stop() -> None:
        let_pass()
        stop_trace()

    monkeypatch.setattr(jax.profiler, 'stop_trace', stop)
    keys = 'train.profile={start: 3, steps: 2}', 'checkpoint.every=100'
    lines = train(tmp_path, monkeypatch, *keys)
    assert list((tmp_path / 'run/profile').rglob('*.xplane.pb'))
    assert max(line['step_ms'] for line in lines.values()) < 1e3 * LONG
    assert seconds(tmp_path)['productive'] < LONG
    assert seconds(tmp_path)['other'] > LONG


def test_finding_fp8_scales_is_no_part_of_a_step_or_of_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_pass: Callable[[], None]
) -> None:
    def find(calibration: Calibration, step: int, state: TrainState, batch: Any) -> TrainState:
        if calibration.is_due(step):
            with jax.profiler.TraceAnnotation('finds the scales'):
                let_pass()
        return state

    monkeypatch.setattr(Calibration, 'scaled', find)
    keys = 'train.dtype=fp8', 'train.profile={start: 0, steps: 2}', 'train.steps=3'
    lines = train(tmp_path, monkeypatch, *keys)
    assert max(line['step_ms'] for line in lines.values()) < 1e3 * LONG
    (file,) = (tmp_path / 'run/profile').rglob('*.xplane.pb')
    assert [*read_trace(file).steps] == [1, 2]
    assert b'finds the scales' not in file.read_bytes()
    assert seconds(tmp_path)['compile'] > LONG
