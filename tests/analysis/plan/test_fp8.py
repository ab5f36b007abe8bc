"""Rounding to FP8: what a matmul gains it also costs memory traffic."""

from dataclasses import replace

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.programs import MEGATRON
from megajax.analysis.plan.time import StepTime, step_time
from megajax.core.config import load
from megajax.core.hardware.records import hardware

CONFIG = load(
    'llama3_8b',
    (
        'mesh.data=1',
        'mesh.model=8',
        'train.batch_size=1',
        'train.microbatches=1',
        'train.dtype=fp8',
    ),
)
SHARDED = changed(CONFIG, mesh__sequence_parallel=True)


def timed(config=CONFIG, gpu='h100', **settings) -> StepTime:
    program = replace(MEGATRON, **settings)
    return step_time(config, Cluster.of(hardware(gpu), 8), program)


def test_current_scaling_moves_more_than_delayed() -> None:
    assert timed(rounding='current').memory_bound > timed(rounding='delayed').memory_bound


def test_groups_that_gather_rounded_tensors_round_shards() -> None:
    each, shards = (timed(SHARDED, rounds_shards=x).memory_bound for x in (False, True))
    assert shards < each
    # Without sequence parallelism, every GPU has all tokens.
    assert timed(rounds_shards=True) == timed(rounds_shards=False)


def test_a_transpose_in_a_kernel_of_its_own_costs_more_and_none_is_needed_on_blackwell() -> None:
    alone, fused = (timed(fuses_transpose=x).memory_bound for x in (False, True))
    assert fused < alone
    on_blackwell = [timed(gpu='b200', fuses_transpose=x) for x in (False, True)]
    assert on_blackwell[0] == on_blackwell[1]


def test_a_step_in_bf16_rounds_nothing() -> None:
    config = changed(SHARDED, train__dtype='bfloat16')
    assert timed(config, rounding='current') == timed(config, rounding='delayed')


def test_megatron_scales_as_the_config_says() -> None:
    for scaling in ('current', 'delayed'):
        config = changed(SHARDED, train__fp8_scaling=scaling)
        assert timed(config) == timed(config, rounding=scaling)


def test_a_plan_says_whether_the_efficiency_of_fp8_was_fitted() -> None:
    asked = {'gpus': 8, 'program': 'megatron'}
    on_hopper = plan(CONFIG, gpu='h100', **asked)
    assert 'FP8 matmul 71% (fitted)' in on_hopper.efficiencies
    reason = 'no megatron step with delayed scaling was measured (\u00b1 10%)'
    assert reason in on_hopper.band_reasons
