"""What failures take: the goodput is highest where Young's formula says, and never what no failure
would allow.
"""

import dataclasses

import pytest

from megajax.analysis.plan.goodput import Faults, faults
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.time import step_time
from megajax.core.config import load
from megajax.core.counts.parameters import num_parameters
from megajax.core.hardware.records import hardware

FAULTS = Faults(
    checkpoint_bytes=10**11,
    hold_up=5.0,
    write=10.0,
    between_failures=3600.0,
    restart=300.0,
    interval=600.0,
)


def test_no_interval_is_better_than_the_best():
    best = FAULTS.best_interval
    assert best == pytest.approx((2 * 5 * 3600) ** 0.5)
    assert max(range(10, 5000), key=FAULTS.goodput) == pytest.approx(best, rel=0.05)


def test_no_save_begins_before_the_last_is_done():
    assert dataclasses.replace(FAULTS, write=1000.0).best_interval == 1000


@pytest.mark.parametrize(
    'worse', [{'hold_up': 50.0}, {'write': 500.0}, {'between_failures': 600.0}, {'restart': 3000.0}]
)
def test_whatever_is_worse_costs_goodput(worse):
    assert 0 < dataclasses.replace(FAULTS, **worse).goodput(600) < FAULTS.goodput(600) < 1


def test_a_checkpoint_is_the_state_and_a_host_more_writes_it_sooner():
    for gpus, data in ((8, 1), (64, 8)):
        config = load('llama3_8b', ['optim.shard=true', f'mesh.data={data}', 'mesh.model=8'])
        cluster = Cluster.of(hardware('h100'), gpus)
        found = faults(config, step_time(config, cluster), cluster)
        assert found.checkpoint_bytes == pytest.approx(12 * 8.03e9, rel=0.01)
        assert found.write == found.checkpoint_bytes / (gpus / 8 * 1e9)
        assert found.hold_up == pytest.approx(found.checkpoint_bytes / gpus / 20e9, rel=3e-3)
        assert found.between_failures == pytest.approx(3600 * 50_677 / gpus, rel=1e-3)


def test_a_checkpoint_of_moments_in_16_bits_is_a_third_smaller_and_replicas_hold_more():
    cluster = Cluster.of(hardware('h100'), 64)

    def found(*overrides: str) -> Faults:
        config = load('llama3_8b', ['mesh.data=8', 'mesh.model=8', *overrides])
        return faults(config, step_time(config, cluster), cluster)

    plain, rounded = found(), found('optim.moments_dtype=bfloat16')
    assert rounded.checkpoint_bytes == plain.checkpoint_bytes * 8 / 12
    # but for the norms, which every GPU has
    assert found('mesh.replicas=4').hold_up == pytest.approx(4 * plain.hold_up, rel=2e-3)


@pytest.mark.parametrize(
    ('name', 'mesh'),
    [
        (
            'llama3_8b',
            [
                'mesh.stages=8',
                'mesh.data=1',
                'mesh.model=1',
                'train.microbatches=8',
                'optim.shard=none',
            ],
        ),
        ('llama3_8b', ['mesh.context=8', 'mesh.data=1', 'mesh.model=1', 'optim.shard=weights']),
        ('mixtral_8x7b', ['mesh.data=8', 'mesh.model=1', 'mesh.experts=8', 'optim.shard=none']),
    ],
    ids=['stages', 'context', 'experts'],
)
def test_a_gpu_copies_only_the_part_of_the_state_that_it_has(name: str, mesh: list[str]) -> None:
    config, cluster = load(name, mesh), Cluster.of(hardware('h100'), 8)
    found = faults(config, step_time(config, cluster), cluster)
    state = memory(config)
    assert found.hold_up == (state.parameters + state.optimizer) / 20e9
    assert found.hold_up < 0.25 * found.checkpoint_bytes / 20e9


def test_a_checkpoint_has_no_moments_of_what_is_frozen():
    config = load('arr_coc_32b')
    cluster = Cluster.of(hardware('a100'), 8)
    found = faults(config, step_time(config, cluster), cluster)
    assert found.checkpoint_bytes == pytest.approx(4 * num_parameters(config.model), rel=0.03)


def test_a_checkpoint_is_due_by_steps_or_by_minutes():
    cluster = Cluster.of(hardware('h100'), 1)
    often, seldom = (
        load('gpt2_124m', ['mesh.data=1', 'mesh.model=1', 'checkpoint.every=1000', *more])
        for more in (['checkpoint.minutes=1'], [])
    )
    time = step_time(seldom, cluster)
    assert faults(often, time, cluster).interval == 60
    assert faults(seldom, time, cluster).interval == 1000 * time.total


@pytest.mark.parametrize(('minutes', 'allows'), [('0.1', False), ('10000', True), ('null', True)])
def test_the_best_interval_is_one_that_the_minutes_allow(minutes: str, allows: bool) -> None:
    config = load('gpt2_124m', ['mesh.data=8', 'mesh.model=1', f'checkpoint.minutes={minutes}'])
    found = plan(config, gpu='h100')
    line = found.faults
    assert (line.best_minutes is None) == allows
    assert ('checkpoint.minutes=' in str(found)) == (not allows)
    values = {'every': line.best_every, 'minutes': line.best_minutes or config.checkpoint.minutes}
    best = config.model_copy(update={'checkpoint': config.checkpoint.changed(**values)})
    cluster = Cluster.of(hardware('h100'), 8)
    lost = faults(best, step_time(best, cluster), cluster)
    assert lost.goodput(lost.interval) == pytest.approx(line.best_goodput)
