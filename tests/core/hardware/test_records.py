"""Types of GPU: what is known by name agrees with the rest of the project, and what is wrong in a
user's file is said.
"""

from importlib import resources

import pytest
from ruamel.yaml import YAML

from megajax.core.config import ConfigError
from megajax.core.hardware.records import (
    Efficiency,
    Hardware,
    hardware,
    hardware_names,
    hardware_of,
    record_name,
)
from megajax.core.hardware.targets import GPUS

FIGURES = {
    'peak_flops',
    'memory',
    'memory_bandwidth',
    'power',
    'inside_host',
    'across_hosts',
    'pcie',
    'efficiency',
    'reference',
    'compiler',
}


@pytest.mark.parametrize('name', hardware_names())
def test_every_figure_has_a_source(name):
    gpu = hardware(name)
    of_die = {'watts_per_tflops'} if gpu.die else set()
    of_host = {'host_bandwidth'} if gpu.host_bandwidth else set()
    assert set(gpu.sources) == (FIGURES | of_die | of_host) - (
        {'compiler'} if gpu.compiler is None else set()
    )


@pytest.mark.parametrize('name', GPUS)
def test_the_compiler_is_told_the_same(name):
    gpu = hardware(name)
    assert gpu.compiler is not None
    assert gpu.memory_bandwidth == pytest.approx(gpu.compiler.bandwidth, rel=0.01)
    assert hardware_of(gpu.compiler.name) == gpu


def test_v100s_have_the_hosts_and_the_power_of_their_boards():
    sxm2, sxm3 = (hardware_of(f'Tesla V100-{board}-32GB') for board in ('SXM2', 'SXM3'))
    assert (sxm2.devices_per_host, sxm2.power) == (8, 300)
    assert (sxm3.devices_per_host, sxm3.power) == (16, 350)
    assert record_name('V100') == 'v100'


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


def test_a_gpu_like_another_takes_what_it_does_not_give_and_each_source_with_its_figure(tmp_path):
    file, h200 = tmp_path / 'mine.yaml', hardware('h200')
    file.write_text(
        'like: h200\nname: mine\nmemory: 1\nmemory_bandwidth: 1.0\npower: 700\ndie: hopper\n'
        'pcie: {bandwidth: 1.0, latency: 0.0}\n'
        'sources: {inside_host: measured, memory: mine, memory_bandwidth: mine, power: mine, '
        'pcie: mine}'
    )
    own = hardware(file)
    assert (own.peak_flops, own.inside_host) == (h200.peak_flops, h200.inside_host)
    assert own.pcie != h200.pcie
    assert own.sources['inside_host'] == 'measured'
    assert own.sources['across_hosts'] == hardware('h100').sources['across_hosts']
    assert own.sources['pcie'] == 'mine'
    assert 'compiler' not in own.sources
    assert (own.fit, own.compiler, own.device_kinds) == (h200.fit, None, ())
    assert own.compute_capability == h200.compute_capability == (9, 0)


@pytest.mark.parametrize('name', hardware_names())
def test_no_record_is_like_a_record_that_is_like_another(name):
    folder = resources.files('megajax.core.hardware') / 'gpus'
    other = YAML(typ='safe').load((folder / f'{name}.yaml').read_text()).get('like')
    assert other is None or '\nlike:' not in (folder / f'{other}.yaml').read_text()


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('like: h10', 'mine.yaml: like: h10: choose among a100, '),
        ('like: h100\ndie: blackwell', 'capability: missing, and h100 has a different die; add it'),
        (
            'like: h100\nname: x\nmemory: 1\npower: 1\nsources: {memory: mine}',
            'mine.yaml: sources: power: missing; add the source of each figure',
        ),
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
    [
        ('h10', 'choose among a100, a100_40gb, b200, b300, gb200, gb300, h100'),
        ('missing.yaml', 'no such file'),
    ],
)
def test_an_unknown_name_lists_the_known(name, message):
    with pytest.raises(ConfigError, match=message):
        hardware(name)


@pytest.mark.parametrize('name', ['H100', 'A100-40GB', 'h100-pcie', 'A100 40GB'])
def test_a_name_is_read_in_any_case_and_with_any_hyphen(name):
    assert hardware(name) == hardware(name.lower().replace('-', '_').replace(' ', '_'))


@pytest.mark.parametrize(
    ('written', 'name'),
    [
        ('h100-sxm', 'h100'),
        ('H100-SXM5-80GB', 'h100'),
        ('A100-80GB', 'a100'),
        ('NVIDIA A100 SXM 80 GB', 'a100'),
        ('A100-SXM4-40GB', 'a100_40gb'),
        ('H100-PCIe-80GB', 'h100_pcie'),
        ('H100 NVL', 'h100_nvl'),
        ('GB200 NVL72', 'gb200'),
        ('Tesla V100-SXM2-32GB', 'v100_sxm2'),
        ('V100-SXM2-32GB', 'v100_sxm2'),
        ('V100-SXM3-32GB', 'v100'),
    ],
)
def test_a_name_may_have_all_words_of_the_gpu(written, name):
    assert record_name(written) == name


@pytest.mark.parametrize(
    'name', ['h100-cnx', 'A100-PCIE-80GB', 'V100-16GB', 'GH200', 'nvidia', '80gb']
)
def test_a_name_with_a_word_of_another_gpu_is_none_of_ours(name):
    assert record_name(name) == name


@pytest.mark.parametrize('name', ['4090', 'L40S', 'a10'])
def test_a_gpu_without_a_record_gets_the_page_that_says_how_to_write_one(name):
    with pytest.raises(ConfigError, match=rf'GPU {name}: choose .*docs/extend\.md'):
        hardware(name)


def test_blackwell_ultra_has_cards_of_800_gigabits():
    """At 97 % of their rate, twice that of the card of 400 Gb/s of a B200."""
    rates = {name: hardware(name).across_hosts.bandwidth for name in ('b200', 'b300', 'gb300')}
    assert rates == {'b200': 48.5e9, 'b300': 97e9, 'gb300': 97e9}


def test_pcie_joins_no_hosts():
    assert hardware('gb200').devices_per_domain == 72
    assert hardware('gb200', 'pcie').devices_per_domain is None


@pytest.mark.parametrize('name', hardware_names())
def test_gpus_without_nvlink_send_over_pcie(name):
    gpu, over_pcie = hardware(name), hardware(name, 'pcie')
    assert over_pcie.inside_host == gpu.pcie
    assert gpu.pcie.bandwidth <= gpu.inside_host.bandwidth
    others = {'inside_host', 'name', 'devices_per_domain'}
    assert over_pcie.model_dump(exclude=others) == gpu.model_dump(exclude=others)


def test_a_link_that_a_gpu_does_not_have_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match='--link nvlink: bridges join two GPUs of NVIDIA H100 PCI'
    ):
        hardware('h100_pcie', 'nvlink')
    text = (resources.files('megajax.core.hardware') / 'gpus/h100.yaml').read_text()
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith('pcie:')]
    (tmp_path / 'mine.yaml').write_text(''.join(lines))
    with pytest.raises(
        ConfigError, match=r'--link pcie: .* has no pcie: \{bandwidth, latency\}; add'
    ):
        hardware(tmp_path / 'mine.yaml', 'pcie')


def test_a_file_has_what_the_schema_has():
    others = {'name', 'device_kinds', 'devices_per_host', 'devices_per_domain', 'sources', 'fit'}
    others |= {'capability', 'die', 'host_bandwidth'}
    assert set(Hardware.model_fields) - others == FIGURES


@pytest.mark.parametrize('name', hardware_names())
def test_every_record_has_a_compute_capability_in_one_place(name):
    gpu = hardware(name)
    assert (gpu.capability is None) == (gpu.compiler is not None)
    assert gpu.compute_capability is not None
