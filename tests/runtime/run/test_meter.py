"""Rates and memory of a step, and the seconds between the steps."""

import time

import jax
import jax.numpy as jnp
import pytest
from support import make_config

from megajax.core.counts.flops import step_flops
from megajax.runtime.run import meter
from megajax.runtime.run.clock import Clock
from megajax.runtime.run.meter import BetweenSteps, Meter, slowest_and_fullest


def doubled(**options: int) -> jax.stages.Compiled:
    return jax.jit(lambda x: 2 * x, **options).lower(jnp.zeros(1000)).compile()


def test_rates_are_counted_by_hand() -> None:
    config = make_config('gpt', 2, 2)
    found = Meter(config, doubled(), jax.devices()[:4]).measure(0.5)
    assert found['tokens_per_s'] == 2 * config.train.batch_size * config.train.seq_len
    assert found['tflops_per_device'] == pytest.approx(2 * step_flops(config).model / 4 / 1e12)


@pytest.mark.parametrize(('options', 'planned'), [({}, 8000), ({'donate_argnums': 0}, 4000)])
def test_on_a_cpu_the_peak_is_not_known_and_memory_is_what_xla_planned(
    options: dict[str, int], planned: int
) -> None:
    found = Meter(make_config('gpt'), doubled(**options), jax.devices()[:1]).measure(0.5)
    assert not {'mfu', 'memory_bytes'} & found.keys()
    assert found['planned_memory_bytes'] == planned


class Gpu:
    """A device as jax shows one."""

    device_kind, process_index = 'NVIDIA H100 80GB HBM3', 0

    def __init__(self, peak: int):
        self.peak = peak

    def memory_stats(self) -> dict[str, int]:
        return {'bytes_in_use': 1, 'peak_bytes_in_use': self.peak}


@pytest.mark.parametrize(('dtype', 'peak'), [('bfloat16', 989.4e12), ('float32', 494.7e12)])
def test_on_a_gpu_utilisation_is_of_the_peak_of_the_dtype_and_memory_that_of_the_fullest(
    dtype: str, peak: float
) -> None:
    config = make_config('gpt', train={'dtype': dtype})
    found = Meter(config, doubled(), [Gpu(7), Gpu(9)]).measure(1e-3)
    assert found['memory_bytes'] == 9
    assert found['mfu'] == pytest.approx(step_flops(config).model / 2 / 1e-3 / peak)


def test_memory_is_that_of_the_fullest_device_of_all_processes_also_between_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(meter, 'gather', lambda *own: [[*own], [own[0] + 1, 12.0]])
    first = Gpu(7)
    one, between = Meter(make_config('gpt'), doubled(), [first]), BetweenSteps(Clock())
    assert one.measure(0.5)['memory_bytes'] == 7
    between.checkpoint_ms()
    found = between.compare_processes(one)
    assert (found['slowest_process'], found['memory_bytes']) == (1, 12)
    assert one.measure(0.5)['memory_bytes'] == 12
    first.peak = 13
    assert one.measure(0.5)['memory_bytes'] == 13


def test_one_process_is_not_the_slowest() -> None:
    assert slowest_and_fullest(1.0, 0) == {}


def test_the_answers_of_the_others_come_with_the_step_in_flight_which_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = []

    def slowest_and_fullest(seconds: float, memory_bytes: float) -> dict[str, float]:
        own.append(seconds)
        time.sleep(0.1)
        return {}

    monkeypatch.setattr(meter, 'slowest_and_fullest', slowest_and_fullest)
    clock = Clock()
    clock.begin('other')
    one, between = Meter(make_config('gpt'), doubled(), jax.devices()[:1]), BetweenSteps(clock)
    between.begin()
    for _ in range(2):
        between.checkpoint_ms()
        between.compare_processes(one)
    assert clock.seconds('productive') >= 0.2
    assert clock.seconds('other') < 0.1
    assert max(own) < 0.1


def test_the_seconds_are_those_of_a_step_also_where_a_resume_leaves_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = []

    def slowest_and_fullest(seconds: float, memory_bytes: float) -> dict[str, float]:
        own.append(seconds)
        return {}

    monkeypatch.setattr(meter, 'slowest_and_fullest', slowest_and_fullest)
    clock = Clock()
    clock.begin('other')
    one, between = Meter(make_config('gpt'), doubled(), jax.devices()[:1]), BetweenSteps(clock)
    between.begin()
    for steps in (4, 1):
        for _ in range(steps):
            time.sleep(0.1)
            between.checkpoint_ms()
        between.compare_processes(one)
    assert own == pytest.approx([0.1, 0.1], abs=0.05)
