"""GPUs of one die: their compute differs by peak and power limit alone."""

import pytest

from megajax.core.config import ConfigError
from megajax.core.hardware.dies import die
from megajax.core.hardware.records import hardware


def test_h100_and_h200_have_equal_compute() -> None:
    assert hardware('h100').efficiency == hardware('h200').efficiency
    assert hardware('h100').peak_flops == hardware('h200').peak_flops


def test_a_lower_power_limit_lowers_the_clock_of_matmuls_and_no_rate_of_memory() -> None:
    full, limited = hardware('h100').efficiency, hardware('h100_96gb').efficiency
    assert limited.matmul / full.matmul == pytest.approx((500 / 700) ** (1 / 3), rel=1e-3)
    assert limited.flash / full.flash == pytest.approx((500 / 700) ** (1 / 3), rel=1e-3)
    assert (limited.memory, limited.half_size) == (full.memory, full.half_size)


def test_a_higher_power_limit_does_not_raise_the_clock() -> None:
    hopper = die('hopper')
    assert hopper.clock(1400, 989.4e12) == 1


def test_a_file_with_an_unknown_die_names_it(tmp_path) -> None:
    file = tmp_path / 'mine.yaml'
    own = hardware('h100').model_copy(update={'die': 'rubin'})
    file.write_text(own.model_dump_json())
    with pytest.raises(ConfigError, match=r'rubin\.yaml: no such file'):
        hardware(file)
