"""Calibration: it recovers what it measures, and the planner reads what it writes."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import make_config
from typer.testing import CliRunner

import megajax
from megajax.analysis.plan import calibrate
from megajax.analysis.plan.band import ENOUGH, band
from megajax.analysis.plan.calibrate import Rate, fit_link, fit_products
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, MEGATRON
from megajax.analysis.plan.real_step import NO_RATES, busy, config_for, fitted_to_step
from megajax.analysis.plan.time import step_time
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.core.config.experts import ExpertsConfig
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flash import missing_for_flash, uses_flash
from megajax.core.hardware.dies import Efficiency
from megajax.core.hardware.memory import CHOICES, FRACTION
from megajax.core.hardware.records import Link, check_dtype, hardware, hardware_names


def test_the_curve_of_products_is_recovered():
    true = Efficiency(matmul=0.71, half_size=88, memory=1.0)
    rates = [
        Rate(size, 1e14 * true.of_product(size, size, size)) for size in (256, 512, 1024, 4096)
    ]
    assert fit_products(rates, 1e14) == (0.71, 88)


def test_products_that_take_no_time_say_nothing_of_their_rate():
    """As an H100 was measured: a product of 128 takes as long as its launch."""
    measured = 0.313, 2.58, 25.5, 134, 532, 603, 648
    rates = [Rate(size, 1e12 * rate) for size, rate in zip(calibrate.SIZES, measured, strict=True)]
    assert fit_products(rates, 989.4e12) == (0.7, 192)
    assert fit_products(rates[:3], 989.4e12) == fit_products(rates[1:3], 989.4e12)


def test_a_short_product_is_repeated_on_the_device(monkeypatch):
    for seconds, times in ((1e-3, 20), (1e-6, calibrate.MOST_TIMES), (0.5, 1)):
        results = []
        monkeypatch.setattr(
            calibrate,
            '_seconds',
            lambda run, *, most, seconds=seconds, results=results: results.append(run()) or seconds,
        )
        x = 2.0**0.25 * jnp.eye(1)
        assert calibrate._product_seconds(x, most=1) == pytest.approx(seconds / times)
        assert float(results[-1][0, 0]) == pytest.approx(2.0 ** ((times + 1) / 4), rel=1e-4)


@pytest.mark.parametrize('devices', [2, 8])
def test_bandwidth_and_latency_are_recovered(devices):
    found = fit_link(
        [(wire, wire / 3e11 + 2 * (devices - 1) * 4e-6) for wire in (1e5, 1e6, 1e7, 1e8)], devices
    )
    assert found.bandwidth == pytest.approx(3e11)
    assert found.latency == pytest.approx(4e-6)


@pytest.mark.parametrize('seconds', [[2e-6, 1e-6], [1e-6, 1.9e-5]])
def test_where_noise_makes_a_rate_negative_the_largest_message_gives_the_bandwidth(seconds):
    found = fit_link([*zip([1e5, 1e6], seconds, strict=True)], 4)
    assert found.bandwidth == pytest.approx(1e6 / seconds[-1])
    assert found.latency == 0


@pytest.mark.slow
def test_the_devices_at_hand_are_measured_and_planned_for(tmp_path, monkeypatch):
    for name, value in {
        'SIZES': (32, 64),
        'ELEMENTS': (1 << 8, 1 << 12),
        'MEMORY_ELEMENTS': 1 << 16,
    }.items():
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(
        calibrate,
        'config_for',
        lambda devices, **_: make_config('gpt', devices, 1, model={'num_layers': 1}),
    )
    file = tmp_path / 'here.yaml'
    *_, last = calibrate.calibrate(file, seconds=0.1)
    assert last == f'written to {file}'
    assert [path.name for path in tmp_path.iterdir()] == ['here.yaml']
    found = hardware(file)
    assert found.devices_per_host == 8
    assert (found.fit.rows, found.reference.matmul) == (1, 1.0)
    plan = megajax.plan(megajax.load('tiny'), gpu=file, gpus=8)
    assert plan.hardware == 'cpu'
    assert plan.seconds > 0


DEVICE = SimpleNamespace(
    device_kind='NVIDIA H100 80GB HBM3',
    platform='gpu',
    memory_stats=lambda: {'bytes_limit': 7 * 2**30},
)
MEASURED = {
    'float32': [Rate(1024, 2e13), Rate(2048, 1e13)],
    'bfloat16': [Rate(1024, 2e14), Rate(2048, 4e14)],
}
LINK = Link(bandwidth=123456789.0, latency=1e-6)


def test_an_unknown_device_has_the_peaks_and_the_memory_that_were_measured(tmp_path):
    """The plan reads its file, with numbers of four digits."""
    found = calibrate._hardware(DEVICE, None, MEASURED, 7 * 2**30, 1.5e12, LINK)
    assert found.peak_flops == {'float32': 2e13, 'bfloat16': 4e14}
    assert (found.memory, found.memory_bandwidth) == (7 * 2**30, 1.5e12)
    assert (found.inside_host, found.across_hosts, found.power) == (LINK, None, None)
    # A matmul of the fastest rate is the reference, and sizes decide what a matmul reaches.
    assert (found.reference.matmul, found.reference.memory) == (1, 1)
    h200 = hardware('h200')
    trained = h200.efficiency.memory / h200.reference.memory
    assert found.efficiency.memory == pytest.approx(trained, abs=0.005)
    assert found.efficiency.matmul * (1024 / (1024 + found.efficiency.half_size)) ** 3 < 1
    file = tmp_path / 'here.yaml'
    file.write_text(calibrate._yaml(found))
    rounded = LINK.model_copy(update={'bandwidth': 123500000.0})
    assert hardware(file) == found.model_copy(update={'inside_host': rounded})
    assert file.read_text().startswith('name: NVIDIA H100')  # in the order of a record


@pytest.mark.parametrize(('link', 'gpus'), [(None, 1), (None, 2), (LINK, 2), (LINK, 4)])
def test_a_plan_needs_the_links_that_it_uses_and_no_power(link, gpus, tmp_path):
    """Of two GPUs per host, or one if no link was measured."""
    found = calibrate._hardware(DEVICE, None, MEASURED, 7 * 2**30, 1.5e12, link)
    found = found.model_copy(update={'devices_per_host': 2 if link else 1})
    (file := tmp_path / 'mine.yaml').write_text(calibrate._yaml(found))
    config = config_for(gpus, is_gpu=True)
    if gpus > found.devices_per_host:
        said = 'across_hosts: the link between hosts of NVIDIA'
        with pytest.raises(ConfigError, match=said) as caught:
            megajax.plan(config, gpu=file)
        # GPUs of one host need a link as well.
        assert ('or plan for' in str(caught.value)) == bool(link)
        return
    plan = megajax.plan(config, gpu=file, savings=True)
    assert plan.cost.kilowatt_hours is None
    assert 'kWh' not in str(plan)
    assert plan.what_if[0].name == 'as planned'


def test_the_simulated_devices_of_a_cpu_copy_in_its_memory_on_one_host():
    cpu = SimpleNamespace(device_kind='cpu', platform='cpu', memory_stats=dict)
    found = calibrate._hardware(cpu, None, MEASURED, 2**30, 2e10, None)
    assert found.inside_host.bandwidth == 1e10
    assert Cluster.of(found, 8).num_hosts == Cluster.of(found, 4).resized(16).num_hosts == 1
    # They share its memory, its cores and the bandwidth of its memory.
    for devices in (1, 4, 8):
        for cluster in (Cluster.of(found, devices), Cluster.of(found, 2).resized(devices)):
            each, share = cluster.hardware, 8 / devices  # of the eight that were measured
            assert each.memory == found.memory * share
            assert each.memory_bandwidth == found.memory_bandwidth * share
            assert each.inside_host.bandwidth == found.inside_host.bandwidth * share
            assert each.product_rate('float32') == found.product_rate('float32') * share
    # Attention on a CPU is not flash attention, so that its scores need memory.
    config = changed(config_for(1, is_gpu=False), train__dtype='bfloat16')
    assert not uses_flash(config, found.compute_capability)


@pytest.mark.parametrize(
    ('version', 'head_dims'), [('7.5', ()), ('8.9', (64, 128)), ('9.0', (64, 128, 256))]
)
def test_attention_is_that_of_the_gpu_that_was_measured(version, head_dims, monkeypatch):
    gpu = SimpleNamespace(device_kind='NVIDIA X', platform='gpu', compute_capability=version)
    monkeypatch.setattr(jax, 'local_devices', lambda: [gpu])
    found = calibrate._hardware(gpu, None, MEASURED, 2**30, 1e12, None)
    lacks = partial(missing_for_flash, 'bfloat16', capability=found.compute_capability)
    assert tuple(size for size in (64, 128, 256) if not lacks(size)) == head_dims
    # Time and memory agree on whether there is a kernel.
    assert (found.efficiency.flash is not None) == bool(head_dims)
    with pytest.raises(ConfigError, match=r'or add peak_flops\.fp8 if it computes in fp8'):
        check_dtype('fp8', found)


def test_a_known_gpu_keeps_what_its_vendor_says():
    h100 = hardware('h100')
    found = calibrate._hardware(
        DEVICE, h100, MEASURED, h100.memory, h100.memory_bandwidth / 2, None
    )
    assert found.reference.memory == 0.5
    trained = h100.efficiency.memory
    assert found.efficiency.memory == pytest.approx(0.5 / h100.reference.memory * trained)
    assert found.reference.matmul == pytest.approx(4e14 / h100.peak_flops['bfloat16'])
    fast = calibrate._hardware(DEVICE, h100, MEASURED, h100.memory, 1e99, LINK)
    assert (fast.efficiency.memory, fast.reference.memory) == (trained, 1.0)


@pytest.mark.parametrize('name', ['h200', 'a100', 'v100'])
def test_a_copy_at_the_rate_of_the_record_keeps_what_training_reaches(name):
    known = hardware(name)
    rates = {dtype: [Rate(2048, 1e13)] for dtype in known.peak_flops}
    copy = known.reference.memory * known.memory_bandwidth
    found = calibrate._hardware(DEVICE, known, rates, known.memory, copy, None)
    assert found.efficiency.memory == pytest.approx(known.efficiency.memory)
    assert found.reference.memory == pytest.approx(known.reference.memory)


@pytest.mark.parametrize('name', ['h100', 'gb200', 'h100_pcie'])
@pytest.mark.parametrize(('link', 'visible'), [(None, 1), (LINK, 2), (LINK, 4)])
def test_a_known_gpu_differs_only_in_what_was_measured(name, link, visible, tmp_path, monkeypatch):
    """As `plan` reads the file, whose measured numbers have four digits."""
    monkeypatch.setattr(jax, 'local_device_count', lambda: visible)
    known = hardware(name)
    device = SimpleNamespace(device_kind=known.device_kinds[0])
    found = calibrate._hardware(
        device, known, MEASURED, known.memory, known.memory_bandwidth / 2, link
    )
    file = tmp_path / 'here.yaml'
    file.write_text(calibrate._yaml(found))
    read = hardware(file)
    measured = {'name', 'efficiency', 'reference', 'sources', 'fit', 'die'}
    measured |= {'inside_host'} if link else set()
    measured |= {'pcie'} if link and name == 'h100_pcie' else set()
    rounded = {'peak_flops'}
    kept = set(type(known).model_fields) - measured - rounded
    assert {key: getattr(read, key) for key in kept} == {key: getattr(known, key) for key in kept}
    assert read.peak_flops == pytest.approx(known.peak_flops, rel=1e-4)
    assert read.compute_capability == known.compute_capability
    kept = 'flash', 'flash_2', 'half_length', 'fp8'
    for efficiency, expected in zip(
        *([getattr(x.efficiency, key) for key in kept] for x in (read, known)), strict=True
    ):
        assert efficiency is expected is None or efficiency == pytest.approx(expected, rel=1e-3)
    assert read.sources['across_hosts'] == known.sources['across_hosts']


@pytest.mark.parametrize(('name', 'visible'), [('h100', 8), ('h100', 6), ('gb200', 8)])
def test_more_gpus_than_a_part_of_a_known_host_are_a_host(name, visible, monkeypatch):
    monkeypatch.setattr(jax, 'local_device_count', lambda: visible)
    known = hardware(name)
    found = calibrate._hardware(DEVICE, known, MEASURED, known.memory, 1e12, LINK)
    assert found.devices_per_host == visible


def test_a_calibrated_gpu_with_pcie_keeps_its_measured_link(tmp_path):
    known = hardware('h100_pcie')
    found = calibrate._hardware(DEVICE, known, MEASURED, known.memory, 1e12, LINK)
    (file := tmp_path / 'here.yaml').write_text(found.model_dump_json())
    assert hardware(file, 'pcie').inside_host == LINK
    with pytest.raises(ConfigError, match='--link nvlink: bridges join two'):
        hardware(file, 'nvlink')


def test_a_file_without_links_has_no_pcie(tmp_path):
    found = calibrate._hardware(DEVICE, None, MEASURED, 7 * 2**30, 1e12, None)
    (file := tmp_path / 'mine.yaml').write_text(found.model_dump_json())
    assert hardware(file, 'nvlink') == found
    with pytest.raises(ConfigError, match=r'--link pcie: .* has no pcie'):
        hardware(file, 'pcie')


def test_a_device_without_a_limit_has_a_share_of_the_hosts_memory(monkeypatch):
    sizes = {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 8000}
    monkeypatch.setattr('os.sysconf', sizes.__getitem__)
    for stats in (None, {}):
        device = SimpleNamespace(platform='cpu', memory_stats=lambda stats=stats: stats)
        assert calibrate._memory(device) == 4096 * 1000  # of eight devices
    for limit, each in ((4096 * 4000, 4096 * 500), (2**40, 4096 * 1000), (None, 4096 * 1000)):
        monkeypatch.setattr(calibrate, 'host_memory', lambda limit=limit: limit)
        assert calibrate._memory(device) == each


@pytest.mark.parametrize('name', [FRACTION, 'XLA_CLIENT_MEM_FRACTION', None])
def test_the_memory_of_a_gpu_includes_what_jax_leaves_free(name, monkeypatch):
    for choice in CHOICES:
        monkeypatch.delenv(choice, raising=False)
    if name:
        monkeypatch.setenv(name, '0.5')
    limit = (0.5 if name else 0.75) * 8 * 10**9
    gpu = SimpleNamespace(platform='gpu', memory_stats=lambda: {'bytes_limit': int(limit)})
    assert calibrate._memory(gpu) == 8 * 10**9
    with pytest.raises(ConfigError, match='unset XLA_PYTHON_CLIENT_ALLOCATOR'):
        calibrate._memory(SimpleNamespace(platform='gpu', memory_stats=lambda: None))


def test_nothing_is_measured_on_a_platform_without_devices(tmp_path, monkeypatch):
    def fail():
        raise RuntimeError('no such backend')

    monkeypatch.setattr(jax, 'devices', fail)
    with pytest.raises(ConfigError, match='jax has no such devices'):
        next(calibrate.calibrate(tmp_path / 'mine.yaml', seconds=1.0))


def test_runs_are_repeated_until_there_are_some_or_the_time_is_over(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr('time.perf_counter', lambda: clock[0])
    for each, most, times in ((1.0, 2.0, 3), (0.125, 2.0, 8), (0.01, 2.0, 20)):
        runs = []

        def run(each=each, runs=runs):
            runs.append(0)
            clock[0] += each if len(runs) > 1 else 99  # the first compiles

        assert calibrate._seconds(run, most=most) == pytest.approx(each)
        assert len(runs) == times + 1


def test_larger_products_are_left_out_if_they_take_too_long(monkeypatch):
    monkeypatch.setattr(calibrate, '_on_every_device', lambda shape, dtype: np.ones(1))
    asked = []
    monkeypatch.setattr(calibrate, '_product_seconds', lambda x, *, most: asked.append(most) or 0.1)
    rates = [*calibrate._product_rates('float32', 7.0)]
    assert rates == [
        Rate(size, 2 * size**3 / 0.1) for size in (128, 256, 512, 1024, 2048, 4096, 8192)
    ]
    assert {*asked} == {1.0}
    assert [rate.size for rate in calibrate._product_rates('float32', 6.0)] == [128, 256, 512]


def test_a_link_is_measured_by_what_a_ring_sends(monkeypatch):
    devices, seconds = 8, iter(range(1, 99))
    monkeypatch.setattr(calibrate, '_on_every_device', lambda shape, dtype: None)
    monkeypatch.setattr(calibrate, '_seconds', lambda run, *, most: next(seconds))
    monkeypatch.setattr(calibrate, 'fit_link', lambda measured, count: (measured, count))
    measured, count = calibrate._link(1.0)
    assert count == devices
    assert measured == [
        (4 * elements * 2 * (devices - 1) / devices, number)
        for number, elements in enumerate(calibrate.ELEMENTS, 1)
    ]


def test_no_device_makes_the_arrays_of_the_others(monkeypatch):
    """With 16 GPUs, they would need 9 GB of one of them, and as much again for random bits."""
    monkeypatch.setattr(jax, 'device_put', None)
    x = calibrate._on_every_device((4,), 'float32')
    assert x.shape == (8, 4)
    assert {shard.data.shape for shard in x.addressable_shards} == {(1, 4)}


@pytest.mark.parametrize(('platform', 'share'), [('gpu', 1), ('cpu', 8)])
def test_each_gpu_reads_more_than_its_cache_has_however_many_there_are(
    platform, share, monkeypatch
):
    """The devices of a CPU share its memory, so each has a part of the array."""
    shapes = []

    def record(shape, dtype):
        shapes.append(shape)
        return np.zeros(8, np.float32)

    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr(calibrate, '_on_every_device', record)
    monkeypatch.setattr(calibrate, '_seconds', lambda run, *, most: 1.0)
    for count in (1, 8):
        monkeypatch.setattr(jax, 'devices', lambda count=count: [device] * count)
        calibrate._memory_bandwidth(1.0)
    alone, of_eight = (elements for (elements,) in shapes)
    assert (alone, of_eight) == (calibrate.MEMORY_ELEMENTS, alone // share)
    caches = [gpu.compiler.l2_cache for gpu in map(hardware, hardware_names()) if gpu.compiler]
    bytes_of_each = 4 * alone
    assert bytes_of_each > 4 * max(caches)


@pytest.mark.parametrize('matmul', [0.05, 0.31, 0.9])
def test_the_rate_of_training_is_that_of_the_steps(matmul):
    h100, config = hardware('h100'), config_for(8, is_gpu=True)
    true = h100.model_copy(
        update={'efficiency': h100.efficiency.model_copy(update={'matmul': matmul})}
    )
    seconds = step_time(config, Cluster.of(true, 8)).total
    found = fitted_to_step(h100, config, [seconds, 1.1 * seconds, 0.95 * seconds])
    assert found.efficiency.matmul == pytest.approx(matmul, abs=1e-3)
    assert found.fit.band == pytest.approx(h100.fit.band)  # 0.15
    assert found.reference == h100.reference


@pytest.mark.parametrize('name', hardware_names())
def test_a_gpu_trains_in_the_dtype_whose_matmuls_were_measured(name):
    gpu = hardware(name)
    narrow = calibrate._narrow(SimpleNamespace(platform='gpu'), gpu)
    config = config_for(1, is_gpu=True, narrow=narrow)
    assert config.train.dtype in gpu.peak_flops
    assert fitted_to_step(gpu, config, [0.3] * 5).fit.programs['megajax'].dtypes == (narrow,)


@pytest.mark.parametrize(('capability', 'narrow'), [('7.5', 'float16'), ('8.9', 'bfloat16')])
def test_a_gpu_without_a_record_is_measured_in_a_dtype_that_it_has(capability, narrow, monkeypatch):
    gpu = SimpleNamespace(platform='gpu', device_kind='NVIDIA T9', compute_capability=capability)
    monkeypatch.setattr(jax, 'local_devices', lambda: [gpu])
    assert calibrate._narrow(gpu, None) == narrow
    assert calibrate._narrow(SimpleNamespace(platform='cpu'), None) == 'bfloat16'


@pytest.mark.parametrize('is_gpu', [True, False])
def test_the_step_that_is_planned_is_the_one_that_runs(is_gpu):
    config = config_for(2, is_gpu=is_gpu)
    assert config.train.unroll is is_gpu
    assert resolved(config, on_gpu=is_gpu) == config


def test_steps_that_no_rate_explains_leave_their_error():
    config = config_for(8, is_gpu=True)
    found = fitted_to_step(hardware('h100'), config, [1e-6] * 5)
    assert (found.efficiency.matmul, found.fit.band) == (1.0, 1.0)


@pytest.mark.parametrize(('name', 'least'), [('h100', 0.15), ('no rates', NO_RATES)])
def test_one_step_does_not_narrow_the_band_of_the_die(name, least):
    """And the band widens for everything that this step, on 2 GPUs in bf16, does not cover."""
    known = (
        hardware('h100') if name == 'h100' else hardware('h100').model_copy(update={'fit': None})
    )
    measured = fitted_to_step(known, config_for(2, is_gpu=True), [0.3] * 5)

    def error(gpus=2, program=MEGAJAX, **keys):
        config = changed(config_for(gpus, is_gpu=True), **keys)
        cluster = Cluster.of(measured, gpus)
        return band(config, step_time(config, cluster, program), cluster, program).error

    assert error() == pytest.approx(least, abs=0.01)
    experts = ExpertsConfig(count=8, active=2, ffn_size=512)
    for wider in (
        error(gpus=64),
        error(train__dtype='fp8'),
        error(model__experts=experts),
        error(program=MEGATRON),
    ):
        assert wider > error() + 0.005


def test_a_gpu_without_rates_has_the_widest_band_of_a_fitted_die():
    fits = [hardware(name).fit for name in hardware_names()]
    widest = max(fit.band for fit in fits if fit and fit.rows >= ENOUGH)
    assert widest <= NO_RATES < widest + 0.01


def test_a_machine_where_others_work_is_said_to_be_busy(monkeypatch):
    monkeypatch.setattr('os.cpu_count', lambda: 4)
    for load, says in ((0.3, False), (2.0, True)):
        monkeypatch.setattr('os.getloadavg', lambda load=load: (load, 9.0, 9.0))
        assert bool(busy()) == says


def test_the_command_measures_for_as_long_as_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        calibrate, 'calibrate', lambda out, *, seconds: [f'{out.name} in {seconds:g} s']
    )
    done = CliRunner().invoke(
        app, ['plan', 'calibrate', str(tmp_path / 'here.yaml'), '--seconds', '7']
    )
    assert done.output == 'here.yaml in 7 s\n'


def test_a_plan_names_the_steps_of_this_machine_as_what_it_was_fitted_to(tmp_path):
    config = config_for(1, is_gpu=True)
    own = fitted_to_step(hardware('h100').model_copy(update={'die': None}), config, [0.3] * 5)
    (file := tmp_path / 'mine.yaml').write_text(own.model_dump_json())  # JSON is YAML
    calibrated, known = (megajax.plan(config, gpu=gpu) for gpu in (file, 'h100'))
    assert 'fitted to 1 measured step, mean error' in calibrated.efficiencies
    assert calibrated.band_reasons[0].startswith('only one throughput of megajax fitted (')
    assert 'published throughputs, mean error' in known.efficiencies
