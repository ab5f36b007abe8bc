"""The choice of a layout: what the papers found is preferred, and what cannot be says what would
make it possible.
"""

import time

import pytest

from megajax.config import Config, ConfigError, load
from megajax.hardware.records import hardware
from megajax.plan.network import Cluster
from megajax.plan.programs import MEGAJAX, MEGATRON
from megajax.plan.search import Ranking, changed, search, usable_memory, why_slower


def ranking(config: Config, gpu: str, gpus: int) -> Ranking:
    return search(config, Cluster.of(hardware(gpu), gpus))


def small(*overrides: str) -> Config:
    return load('gpt2_124m', overrides)


def test_no_tensor_parallelism_where_the_model_fits_and_the_batch_allows():
    for name, gpus in (('gpt2_124m', 8), ('gpt2_345m', 8), ('megatron_1.2b', 32)):
        config = changed(load(name), model__dropout=0.0, train__dtype='bfloat16')
        assert ranking(config, 'h100', gpus).best.mesh == (gpus, 1)


@pytest.mark.parametrize(
    ('name', 'gpu', 'gpus'),
    [('llama3_8b', 'h100', 64), ('llama3_8b', 'a100', 64), ('gpt2_345m', 'h200', 16)],
)
def test_tensor_parallelism_stays_inside_a_host(name, gpu, gpus):
    found = ranking(load(name), gpu, gpus)
    inside = [choice for choice in found.fitting if choice.config.mesh.model <= 8]
    across = [choice for choice in found.fitting if choice.config.mesh.model > 8]
    assert found.best is inside[0]
    assert all(
        choice.config.mesh.allow_model_across_hosts for choice in across
    )  # so that `megajax train` takes what --write wrote
    if across:
        assert across[0].timed.total > 1.3 * inside[0].timed.total


def test_sequence_parallelism_wherever_there_is_tensor_parallelism():
    found = ranking(load('llama3_8b'), 'h100', 64)
    for model in {choice.config.mesh.model for choice in found.fitting} - {1}:
        assert next(
            choice for choice in found.fitting if choice.config.mesh.model == model
        ).config.mesh.sequence_parallel


def test_every_layout_is_there_once_and_in_order():
    found = ranking(small('train.batch_size=32'), 'h100', 4)
    layouts = [choice.config for choice in (*found.fitting, *found.too_large)]
    # data x model of 4x1, 2x2, 1x4; two or four ways with ZeRO-1 and sequence parallelism; two
    # recomputations; 4, 5 and 6 microbatches, of which the halves of all but one row can take
    # turns.
    assert len(layouts) == len(set(layouts)) == 2 * (2 * 4 + 4 * (5 + 4) + 2 * (6 + 5))
    seconds = [choice.timed.total for choice in found.fitting]
    assert seconds == sorted(seconds)
    assert all(
        choice.bytes <= usable_memory(Cluster.of(hardware('h100'), 4)) for choice in found.fitting
    )


def test_a_mesh_of_which_some_layout_can_be_is_not_impossible():
    found = ranking(
        changed(small(), train__batch_size=40), 'h100', 40
    )  # ZeRO-1 cannot be on any of them
    possible = {choice.mesh for choice in (*found.fitting, *found.too_large)}
    assert possible == {(40, 1), (20, 2), (10, 4)}
    assert found.impossible.keys() == {(8, 5), (5, 8), (4, 10), (2, 20), (1, 40)}


def test_the_reason_says_by_how_much():
    found = ranking(small(), 'h100', 8)
    loser = next(choice for choice in found.fitting if choice.config.mesh.model == 4)
    excess = loser.timed.total / found.best.timed.total - 1
    assert why_slower(loser, found.best).startswith(f'{excess:+.1%}: collectives over model ')


def test_a_mesh_that_cannot_be_says_why():
    found = ranking(small(), 'h100', 8)
    assert found.impossible == {
        (
            1,
            8,
        ): (
            'model.num_heads: 12 is not a multiple of mesh.model=8; use 8 or 16, '
            'or mesh.model 6 or 12'
        )
    }


def test_where_nothing_fits_the_fewest_gpus_that_would_are_named():
    with pytest.raises(ConfigError) as caught:
        ranking(load('llama3_70b'), 'h100', 8)
    first, fix, *_ = str(caught.value).splitlines()
    assert first.startswith('nothing fits on 8 x NVIDIA H100 SXM 80 GB: the smallest layout needs ')
    gpus = int(fix.removeprefix('it fits on ').split()[0])
    assert ranking(load('llama3_70b'), 'h100', gpus).fitting
    with pytest.raises(ConfigError):
        ranking(load('llama3_70b'), 'h100', gpus // 2)


def test_where_nothing_divides_every_mesh_has_its_reason():
    with pytest.raises(ConfigError) as caught:
        ranking(small('mesh.data=1', 'train.batch_size=5', 'train.microbatches=1'), 'h100', 16)
    text = str(caught.value)
    assert 'no mesh of 16 GPUs can train this config' in text
    assert (
        'data=16 x model=1: train.batch_size: 5 is not a multiple of mesh.data=16; use 16' in text
    )
    assert 'data=1 x model=16: model.num_heads: 12 is not a multiple of mesh.model=16' in text


def test_of_many_meshes_that_cannot_be_a_few_have_their_reasons():
    with pytest.raises(ConfigError) as caught:
        ranking(small('mesh.data=1'), 'h100', 720720)
    assert len(caught.value.problems) == 10
    assert str(caught.value).splitlines()[-1] == 'and 232 more meshes'


@pytest.mark.parametrize('gpus', [512, 720720])
def test_many_gpus_are_searched_in_seconds(gpus):
    start = time.process_time()
    ranking(changed(load('llama3_8b'), train__batch_size=2 * gpus), 'h100', gpus)
    assert time.process_time() - start < 5


def test_megatrons_optimizer_pads_where_ours_does_not():
    config = changed(small('model.dropout=0'), train__batch_size=80)
    cluster = Cluster.of(hardware('h100'), 40)
    shards = {
        program: {
            choice.config.optim.shard
            for choice in search(config, cluster, program).fitting
            if choice.mesh == (40, 1)
        }
        for program in (MEGAJAX, MEGATRON)
    }
    assert shards == {MEGAJAX: {False}, MEGATRON: {False, True}}
