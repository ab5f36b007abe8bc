"""The band of a predicted time: how often it holds, and what widens it."""

import math
import re
from dataclasses import replace

import pytest
from support import load_script

from megajax.analysis.plan.band import Band, band
from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, MEGATRON, Software
from megajax.analysis.plan.published.predictions import Prediction, predict
from megajax.analysis.plan.published.tables import TABLES
from megajax.analysis.plan.time import step_time
from megajax.core.config import load
from megajax.core.hardware.records import hardware

ONE = load('llama3_8b', ('mesh.data=1', 'train.batch_size=1', 'train.microbatches=1'))


def band_of(config, gpu: str, program: Software = MEGAJAX) -> Band:
    cluster = Cluster.of(hardware(gpu), config.mesh.num_devices)
    found = band(config, step_time(config, cluster, program), cluster, program)
    assert found is not None
    return found


def holds(prediction: Prediction) -> bool:
    row = prediction.row
    cluster = Cluster.of(hardware(row.gpu), row.num_gpus)
    found = band(row.config, prediction.time, cluster, row.program)
    assert found is not None
    return abs(prediction.error) <= found.error


def test_nine_of_ten_rows_that_are_held_out_are_within_their_bands() -> None:
    held_out = [x for table in TABLES for x in predict(table) if x.row.held_out]
    assert sum(map(holds, held_out)) >= 0.9 * len(held_out)


def test_a_band_widens_with_gpus_that_were_not_measured() -> None:
    sizes = [
        band_of(changed(ONE, mesh__data=n, train__batch_size=n, optim__shard='weights'), 'h200')
        for n in (1, 8, 64)
    ]
    assert sizes[0].error < sizes[1].error < sizes[2].error
    assert 'at most 1 GPU measured (\u00b1 12%)' in sizes[2].reasons


def test_reasons_say_why_two_links_have_different_bands() -> None:
    """The same words would be printed for 17% and 34% if only the hidden share differs."""
    on_eight = changed(ONE, mesh__data=8, train__batch_size=8, optim__shard='weights')
    slow, fast = (band_of(on_eight, gpu) for gpu in ('h200_nvl', 'h200'))
    assert slow.error > fast.error
    assert slow.reasons != fast.reasons
    for found in slow, fast:
        sizes = [float(re.findall(r'\(\u00b1 (\d+)%\)', reason)[0]) for reason in found.reasons]
        assert math.hypot(*sizes) == pytest.approx(100 * found.error, abs=1)


def test_a_band_widens_in_a_dtype_that_was_not_measured() -> None:
    found = band_of(changed(ONE, train__dtype='fp8'), 'h200')
    assert found.error > band_of(ONE, 'h200').error
    assert 'no fp8 step was measured (\u00b1 10%)' in found.reasons
    # 16 bits were measured in one of both dtypes.
    assert band_of(changed(ONE, train__dtype='float16'), 'h200') == band_of(ONE, 'h200')


@pytest.mark.parametrize(
    ('name', 'layers'), [('qwen3_30b_a3b', 'experts'), ('qwen3_vl_2b', 'images')]
)
def test_a_band_widens_with_layers_that_no_fitted_row_has(name: str, layers: str) -> None:
    assert f'no step with {layers} was fitted (\u00b1 15%)' in band_of(load(name), 'h100').reasons
    assert not any(layers in reason for reason in band_of(ONE, 'h100').reasons)


def test_held_out_rates_of_experts_are_within_their_bands() -> None:
    script = load_script('plan_experts')
    for row in script.rows():
        values, cluster = row.values, Cluster.of(hardware('h100'), row.time.devices)
        program = script.PROGRAMS[values['software'], values['preset']]
        found = band(script.config_of(values), row.time, cluster, program)
        assert found is not None
        assert abs(row.error) <= found.error or not row.held_out, (values, found)


def test_a_band_is_widest_for_a_program_that_was_not_measured() -> None:
    unknown = band_of(ONE, 'h200', replace(MEGATRON, name='another'))
    assert unknown.error > 0.15
    assert unknown.error > band_of(ONE, 'h200', MEGATRON).error


def test_few_rows_of_a_program_do_not_narrow_the_band_of_the_die() -> None:
    fit = hardware('h200').fit
    assert fit is not None
    assert fit.programs['megajax'].band < fit.band
    assert band_of(ONE, 'h200').error == pytest.approx(fit.band)


def test_without_a_fit_there_is_no_band() -> None:
    gpu = hardware('h200').model_copy(update={'fit': None})
    cluster = Cluster.of(gpu, 1)
    assert band(ONE, step_time(ONE, cluster), cluster, MEGAJAX) is None


def test_a_fit_without_programs_covers_one_gpu_and_no_program() -> None:
    fit = hardware('h200').fit
    assert fit is not None
    gpu = hardware('h200').model_copy(update={'fit': fit.model_copy(update={'programs': {}})})
    found = band(ONE, step_time(ONE, Cluster.of(gpu, 1)), Cluster.of(gpu, 1), MEGAJAX)
    assert found is not None
    assert found.error >= math.hypot(fit.band, 0.15)
    assert 'which says what was measured: calibrate again' in found.reasons[0]
    in_float32 = changed(ONE, train__dtype='float32')
    found = band(in_float32, step_time(ONE, Cluster.of(gpu, 1)), Cluster.of(gpu, 1), MEGAJAX)
    assert found is not None
    assert found.reasons[1].startswith('no float32 step is known to be measured')
