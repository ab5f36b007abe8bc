"""Calibration: it recovers what it measures, and the planner reads what it writes."""

import jax.numpy as jnp
import pytest
from support import make_config
from typer.testing import CliRunner

import megajax
from megajax.analysis.plan import calibrate
from megajax.analysis.plan.calibrate import Rate, fit_link, fit_products
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.real_step import busy, config_for, fitted_to_step
from megajax.analysis.plan.time import step_time
from megajax.commands.main import app
from megajax.core.hardware.dies import Efficiency
from megajax.core.hardware.records import hardware


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


@pytest.mark.parametrize('matmul', [0.05, 0.31, 0.9])
def test_the_rate_of_training_is_that_of_the_steps(matmul):
    h100, config = hardware('h100'), config_for(8, is_gpu=True)
    true = h100.model_copy(
        update={'efficiency': h100.efficiency.model_copy(update={'matmul': matmul})}
    )
    seconds = step_time(config, Cluster.of(true, 8)).total
    found = fitted_to_step(h100, config, [seconds, 1.1 * seconds, 0.95 * seconds])
    assert found.efficiency.matmul == pytest.approx(matmul, abs=1e-3)
    assert found.fit.band == pytest.approx(0.1)
    assert found.reference == h100.reference


def test_steps_that_no_rate_explains_leave_their_error():
    config = config_for(8, is_gpu=True)
    found = fitted_to_step(hardware('h100'), config, [1e-6] * 5)
    assert (found.efficiency.matmul, found.fit.band) == (1.0, 1.0)


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
