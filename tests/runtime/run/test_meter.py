"""Rates and memory of a step, from its seconds, its FLOPs and the device."""

import jax
import jax.numpy as jnp
import pytest
from support import make_config

from megajax.core.counts.flops import step_flops
from megajax.runtime.run.meter import Meter, slowest


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


def test_one_process_is_not_the_slowest() -> None:
    assert slowest(1.0) == {}
