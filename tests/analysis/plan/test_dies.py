"""GPUs with one die differ as their memory and clock do."""

from pathlib import Path

import pytest
from support import load_script

from megajax.core.config import presets
from megajax.core.hardware.dies import Efficiency, die
from megajax.core.hardware.records import hardware

RESULTS = Path(__file__).parents[3] / 'benchmarks/results'
script = load_script('plan_dies')


def test_an_h200_is_as_much_faster_as_memory_explains_on_every_preset() -> None:
    stored = max(RESULTS.glob('*_plan_dies.md')).read_text()
    for preset in presets():
        found = script.compared(preset)
        assert found.is_explained, found
        # Launches and overlap of the smallest steps change by less than the gain of memory.
        assert found.ratio > 0.997, found
        assert str(found) in stored, 'python benchmarks/plan_dies.py writes it'


@pytest.mark.parametrize('name', ['h100_nvl', 'h100_pcie', 'h100_96gb', 'h200_nvl', 'h200'])
def test_matmuls_of_a_die_differ_by_its_clock(name: str) -> None:
    gpu, hopper = hardware(name), die('hopper')
    clock = hopper.clock(gpu.power, gpu.peak_flops['bfloat16'])
    assert gpu.efficiency.matmul == pytest.approx(hopper.efficiency.matmul * clock)
    assert (clock < 1) == (name in ('h100_nvl', 'h100_pcie', 'h100_96gb'))


def test_attention_has_the_share_of_the_other_kernel_if_only_that_is_given() -> None:
    both = Efficiency(matmul=0.7, half_size=100, flash=0.6, flash_2=0.3, half_length=0, memory=0.6)
    kernels = 'flash', 'flash_2'
    for given, shares in (
        (both, [0.6, 0.3]),
        (both.changed(flash_2=None), [0.6, 0.6]),
        (both.changed(flash=None), [0.3, 0.3]),
        (both.changed(flash=None, flash_2=None), [None, None]),
    ):
        assert [given.of_attention(kernel, 4096) for kernel in kernels] == shares
