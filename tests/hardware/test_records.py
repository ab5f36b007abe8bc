"""Types of GPU: what is known by name agrees with the rest of the project, and what is wrong in a
user's file is said.
"""

import pytest

from megajax.config import ConfigError
from megajax.hardware.records import Efficiency, Hardware, hardware, hardware_names, hardware_of
from megajax.hardware.targets import GPUS

FIGURES = {
    'peak_flops',
    'memory',
    'memory_bandwidth',
    'power',
    'inside_host',
    'across_hosts',
    'efficiency',
    'reference',
    'compiler',
}


@pytest.mark.parametrize('name', hardware_names())
def test_every_figure_has_a_source(name):
    gpu = hardware(name)
    assert set(gpu.sources) == FIGURES - ({'compiler'} if gpu.compiler is None else set())


@pytest.mark.parametrize('name', GPUS)
def test_the_compiler_is_told_the_same(name):
    gpu = hardware(name)
    assert gpu.compiler is not None
    assert gpu.memory_bandwidth == pytest.approx(gpu.compiler.bandwidth, rel=0.01)
    assert hardware_of(gpu.compiler.name) == gpu


@pytest.mark.parametrize('kind', ['cpu', 'TPU v5e', 'NVIDIA GeForce RTX 4090'])
def test_a_device_that_is_not_known_is_none(kind):
    assert hardware_of(kind) is None


def test_larger_products_reach_more_of_the_peak_and_the_largest_the_share():
    efficiency = Efficiency(matmul=0.8, half_size=100, memory=1.0)
    assert efficiency.of_product(100, 10**9, 10**9) == pytest.approx(0.4)
    assert (
        efficiency.of_product(200, 100, 50)
        == efficiency.of_product(50, 200, 100)
        < efficiency.of_product(200, 100, 51)
    )


def test_a_file_of_ones_own_is_read(tmp_path):
    file = tmp_path / 'mine.yaml'
    own = hardware('h100').model_copy(update={'name': 'mine'})
    file.write_text(own.model_dump_json())  # JSON is YAML
    assert hardware(file) == hardware(str(file)) == own


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('name: x\nmemry: 3', 'mine.yaml: memry: Extra inputs are not permitted'),
        ('name: x\nname: y', 'mine.yaml: not valid YAML'),
        ('a string', 'mine.yaml: the file: Input should be'),
        (
            'inside_host: {bandwidth: 0, latency: 0}',
            'mine.yaml: inside_host.bandwidth: Input should be greater than 0',
        ),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, text, message):
    file = tmp_path / 'mine.yaml'
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        hardware(file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ('name', 'message'),
    [('h10', 'choose among a100, a100_40gb, b200, h100'), ('missing.yaml', 'no such file')],
)
def test_an_unknown_name_lists_the_known(name, message):
    with pytest.raises(ConfigError, match=message):
        hardware(name)


def test_a_file_has_what_the_schema_has():
    assert (
        set(Hardware.model_fields) - {'name', 'device_kinds', 'devices_per_host', 'sources', 'fit'}
        == FIGURES
    )
