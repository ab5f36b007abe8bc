"""What the compiler is told of a GPU that is not there is what CUDA's guide and the vendor say."""

import re

import jax
import pytest
from jax.experimental import topologies

from megajax.core.config import ConfigError
from megajax.core.hardware import targets as gpu
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import (
    GPUS,
    NO_TILES,
    check_target,
    compile_without_gpu,
    gpu_devices,
    num_hosts,
)

KB = 1024
FP32_UNITS = {(8, 0): 64, (9, 0): 128, (10, 0): 128}  # of one multiprocessor
PLUGINS = ['jax_plugins.xla_cuda12', 'jax_plugins.xla_cuda13']
ON_ALL = {
    'threads_per_warp': 32,
    'threads_per_block_limit': 1024,
    'threads_per_core_limit': 2048,
    'registers_per_core_limit': 64 * KB,
    'registers_per_block_limit': 64 * KB,
    'shared_memory_per_block': 48 * KB,
    'block_dim_limit_x': 2**31 - 1,
    'block_dim_limit_y': 2**16 - 1,
    'block_dim_limit_z': 2**16 - 1,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What XLA is asked for; it answers with a name for each device."""
    calls = list[dict]()

    def answer(**given: str) -> topologies.TopologyDescription:
        calls.append(given)
        return topologies.TopologyDescription(['first', 'second'])

    monkeypatch.setattr(topologies, 'get_topology_desc', answer)
    return calls


def told(asked: list[dict], target: str) -> dict[str, str]:
    gpu_devices(target, hosts=1, per_host=1)
    figures = re.findall(r'^ *(\w+): "?([^"\n]*)', asked[-1]['target_config'], re.MULTILINE)
    return dict(figures)


def test_the_compiler_is_asked_for_gpus_by_hosts_and_devices_of_each(asked: list[dict]) -> None:
    assert gpu_devices('h200', hosts=3, per_host=4) == ['first', 'second']
    [call] = asked
    assert call.get('platform') == 'cuda'  # without one jax takes TPUs
    assert call.get('topology') == '1x3x4'
    assert 'NVIDIA H200' in call['target_config']


@pytest.mark.parametrize('target', GPUS)
def test_the_compiler_is_told_the_limits_of_the_guide(asked: list[dict], target: str) -> None:
    found, one = told(asked, target), hardware(target)
    assert {name: int(found[name]) for name in ON_ALL} == ON_ALL
    assert int(found['fpus_per_core']) == FP32_UNITS[one.compiler.capability]
    major, minor = one.compiler.capability
    assert f'{{ major: {major} minor: {minor} }}' in asked[-1]['target_config']
    # CUDA keeps one KB of each block for itself.
    assert int(found['shared_memory_per_core']) - int(found['shared_memory_per_block_optin']) == KB


@pytest.mark.parametrize('target', GPUS)
def test_the_compiler_is_told_all_figures_of_the_gpu(asked: list[dict], target: str) -> None:
    found, one = told(asked, target), hardware(target)
    assert int(found['core_count']) == one.compiler.cores
    assert float(found['clock_rate_ghz']) == one.compiler.clock_ghz
    assert int(found['device_memory_size']) == one.memory
    assert int(found['memory_bandwidth']) == one.compiler.bandwidth
    assert int(found['l2_cache_size']) == one.compiler.l2_cache
    assert found['device_description_str'] == one.compiler.name
    assert found['platform_name'] == 'CUDA'


@pytest.mark.parametrize(('target', 'tflops'), [('a100', 19.5), ('h100', 66.9), ('h200', 66.9)])
def test_cores_and_clock_give_the_fp32_rate_of_the_sheet(target: str, tflops: float) -> None:
    one = hardware(target)
    rate = (
        2 * one.compiler.cores * FP32_UNITS[one.compiler.capability] * one.compiler.clock_ghz / 1e3
    )
    assert rate == pytest.approx(tflops, rel=0.003)


@pytest.mark.parametrize('devices', [1, 6, 7, 12, 22, 96])
def test_hosts_may_be_any_number_that_divides_the_devices_and_no_other(devices: int) -> None:
    for hosts in range(1, devices + 2):
        if devices % hosts == 0:
            assert num_hosts(devices, hosts) == hosts
        else:
            with pytest.raises(ConfigError, match=f'{hosts} hosts do not divide'):
                num_hosts(devices, hosts)


@pytest.mark.parametrize('plugin', ['', 'jax_plugins', *PLUGINS])
def test_either_plugin_has_the_compiler(monkeypatch: pytest.MonkeyPatch, plugin: str) -> None:
    found = {plugin, plugin.split('.')[0]}
    monkeypatch.setattr(gpu.importlib.util, 'find_spec', lambda name: name in found or None)
    has_one = plugin in PLUGINS
    assert gpu.has_compiler() == has_one
    check_target('cpu')
    if has_one:
        return check_target('h100')
    with pytest.raises(ConfigError, match='gpu-compile'):
        check_target('h100')


class Compiler:
    """One that fails with a message wherever Triton's products are allowed."""

    def __init__(self, message: str):
        self.message, self.asked = message, list[dict]()

    def __call__(self, options: dict) -> str:
        self.asked.append(options)
        if options.get('xla_gpu_enable_triton_gemm', True):
            raise jax.errors.JaxRuntimeError(f'INTERNAL: {self.message}')
        return 'compiled'


@pytest.mark.parametrize('message', NO_TILES)
def test_where_triton_has_no_tiles_its_products_are_left_to_cublas(message: str) -> None:
    compiler = Compiler(message)
    assert compile_without_gpu(compiler, {'own': 1}) == 'compiled'
    assert [options['own'] for options in compiler.asked] == [1, 1]


def test_another_error_of_the_compiler_is_raised_at_once() -> None:
    compiler = Compiler('RESOURCE_EXHAUSTED: out of memory')
    with pytest.raises(jax.errors.JaxRuntimeError, match='out of memory'):
        compile_without_gpu(compiler, {})
    assert len(compiler.asked) == 1
