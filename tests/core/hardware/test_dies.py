"""GPUs of one die: their compute differs by peak and power limit alone."""

from importlib import resources

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


def h100_with(tmp_path, old: str, new: str):
    text = (resources.files('megajax.core.hardware') / 'gpus/h100.yaml').read_text()
    assert old in text
    file = tmp_path / 'mine.yaml'
    file.write_text(text.replace(old, new))
    return file


@pytest.mark.parametrize(
    ('old', 'new', 'message'),
    [
        (
            'die: hopper',
            'die: hopper\nefficiency: {matmul: 0.6, half_size: 0, memory: 0.5}',
            'efficiency: differs from the values of die: hopper',
        ),
        (
            'die: hopper',
            'die: hopper\nreference: {matmul: 0.9, memory: 0.9}',
            'reference: differs from the values of die: hopper',
        ),
        ('die: hopper', 'die: hopper\nfit: null', 'fit: differs from the values of die: hopper'),
        ('die: hopper', 'die: hopper\nreference: high', 'reference: differs from the values'),
        ('bfloat16: 989.4e12, ', '', 'peak_flops.bfloat16: the clock of a die follows from it'),
        ('power: 700', 'power: unknown', 'power: the clock of a die follows from it'),
        ('power: 700', 'power: 0', 'power: the clock of a die follows from it'),
        ('power: 700\n', '', 'power: the clock of a die follows from it'),
        ('die: hopper', 'die: [hopper]', 'die: Input should be a valid string'),
        ('sources:', 'sources: unknown\nnotes:', 'sources: Input should be a valid dictionary'),
    ],
)
def test_a_file_that_its_die_does_not_fit_is_rejected(tmp_path, old, new, message) -> None:
    file = h100_with(tmp_path, old, new)
    with pytest.raises(ConfigError) as caught:
        hardware(file)
    assert f'{file}: {message}' in str(caught.value)


def test_a_file_without_a_die_has_the_efficiencies_that_it_gives(tmp_path) -> None:
    own = (
        'efficiency: {matmul: 0.6, half_size: 0, memory: 0.5}\nreference: {matmul: 0.9, memory: 1}'
    )
    gpu = hardware(h100_with(tmp_path, 'die: hopper', own))
    assert (gpu.efficiency.matmul, gpu.reference.matmul, gpu.fit) == (0.6, 0.9, None)
