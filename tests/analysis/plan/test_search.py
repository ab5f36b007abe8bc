"""The choice of a layout: what the papers found is preferred, and what cannot be says what would
make it possible.
"""

import functools
import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from support import exhaustive, make_config, slow

from megajax.analysis.plan.describe import why_slower
from megajax.analysis.plan.layouts import Mesh, changed, layouts, meshes
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, MEGATRON
from megajax.analysis.plan.search import Ranking, _order, search, that_fits, usable_memory
from megajax.analysis.plan.verdicts import grid_ratio
from megajax.core.config import Config, ConfigError, LoraConfig, load
from megajax.core.config.mesh_rules import replicas_within_hosts
from megajax.core.hardware.records import Hardware, hardware


@functools.cache
def ranking(config: Config, gpu: str, gpus: int) -> Ranking:
    return search(config, Cluster.of(hardware(gpu), gpus))


def with_rows(name: str, rows: int) -> Config:
    """A preset with a batch that has fewer divisors, and so fewer layouts, than its own."""
    return changed(load(name), train__batch_size=rows)


def small(*overrides: str) -> Config:
    return load('gpt2_124m', overrides)


def slow_network(gpu: str, bandwidth: float) -> Hardware:
    record = hardware(gpu)
    link = record.across_hosts.model_copy(update={'bandwidth': bandwidth})
    return record.model_copy(update={'across_hosts': link})


@pytest.mark.parametrize(('is_cpu', 'overlap'), [(False, 'batch_split'), (True, 'none')])
def test_a_cpu_has_no_layout_with_the_schedule_of_gpus(is_cpu: bool, overlap: str) -> None:
    record = hardware('h100')
    record = record.model_copy(update={'device_kinds': ('cpu',)}) if is_cpu else record
    config = load('tiny', ['mesh.data=1', 'mesh.model=2', 'train.batch_size=2'])
    found = search(config, Cluster.of(record, 2))
    in_group = [choice.config.train for choice in found.all if choice.mesh.model == 2]
    assert overlap in {train.overlap for train in in_group}
    assert ({train.unroll for train in in_group} == {False}) == is_cpu


def test_no_tensor_parallelism_where_the_model_fits_and_the_batch_allows():
    for name, gpus in (('gpt2_124m', 8), ('gpt2_345m', 8)):
        keys = {'model__dropout': 0.0, 'train__dtype': 'bfloat16', 'train__batch_size': 2 * gpus}
        config = changed(load(name), **keys)
        assert ranking(config, 'h100', gpus).best.mesh == Mesh(gpus, 1, 1)


@pytest.mark.parametrize(
    ('name', 'gpu', 'gpus'),
    [('llama3_8b', 'h100', 16), exhaustive('llama3_8b', 'a100', 64), slow('gpt2_345m', 'h200', 16)],
)
def test_tensor_parallelism_stays_inside_a_host(name, gpu, gpus):
    found = ranking(with_rows(name, 2 * gpus), gpu, gpus)
    inside = [choice for choice in found.fitting if choice.config.mesh.tensor_parallel <= 8]
    across = [choice for choice in found.fitting if choice.config.mesh.tensor_parallel > 8]
    assert found.best is inside[0]
    assert all(
        choice.config.mesh.allow_model_across_hosts for choice in across
    )  # so that `megajax train` takes what --write wrote
    assert across[0].timed.total > 1.15 * inside[0].timed.total


def test_sequence_parallelism_wherever_there_is_tensor_parallelism():
    found = ranking(with_rows('llama3_8b', 32), 'h100', 16)
    for model in {choice.config.mesh.model for choice in found.fitting} - {1}:
        assert next(
            choice for choice in found.fitting if choice.config.mesh.model == model
        ).config.mesh.sequence_parallel


def test_every_layout_is_there_once_and_in_order():
    found = ranking(small('train.batch_size=32'), 'h100', 4)
    configs = [choice.config for choice in found.all]
    # data x model of 4x1, 2x2, 1x4 and 1x2x2. Four rungs of ZeRO where there are data shards, two
    # ways with sequence parallelism, which a grid has; two recomputations; 4, 5 and 6 microbatches.
    # Only a grid is tried with halves and without, if they have more than two rows.
    flat = [choice for choice in found.all if choice.mesh.is_flat]
    one_d = 4 * 4 + 2 * 4 * 5 + 2 * 6
    grid = 5 + 4  # microbatches of one row cannot be
    assert len(flat) == 2 * (one_d + grid)
    assert len(configs) == len(set(configs)) > len(flat)
    seconds = [choice.timed.total for choice in found.fitting]
    assert seconds == sorted(seconds)
    available = usable_memory(Cluster.of(hardware('h100'), 4))
    assert all(choice.bytes <= available for choice in (*found.fitting, *found.slower))
    assert all(choice.bytes > available for choice in found.too_large)


def test_a_layout_that_is_not_timed_is_slower_than_one_of_its_mesh():
    found = ranking(with_rows('llama3_8b', 32), 'h100', 16)
    assert len(found.slower) > 100
    for choice in found.slower:
        mesh = choice.mesh, choice.config.mesh.sequence_parallel
        best = next(
            other
            for other in found.fitting
            if (other.mesh, other.config.mesh.sequence_parallel) == mesh
        )
        assert choice.time is None
        assert choice.at_least > best.timed.total


def random_case(seed: int) -> tuple[Config, Cluster]:
    """A small model, batch and cluster, of which some layouts do not fit."""
    chance = random.Random(seed)
    name = chance.choice(['gpt', 'llama', 'bert'])
    config = make_config(name, 1, 1)
    per_host = chance.choice([2, 4, 8])
    gpus = per_host * chance.choice([1, 2, 3, 4])
    record = slow_network('h100', chance.choice([1e8, 1e9, 5e10]))
    config = changed(
        config,
        model__num_layers=chance.choice([2, 4, 24]),
        model__dropout=0.0,
        train__batch_size=gpus * chance.choice([1, 2, 4]),
        train__dtype=chance.choice(['bfloat16', 'float32']),
    )
    if seed % 2 and name != 'bert':  # frozen weights have no gradients
        config = config.model_copy(update={'lora': LoraConfig(rank=4)})
    whole = Cluster.of(record, gpus, per_host)
    sizes = sorted(choice.bytes for choice in search(config, whole, prune=False).all)
    memory = int(chance.choice(sizes[: len(sizes) // 2 + 1]) / 0.89)
    return config, Cluster.of(record.model_copy(update={'memory': memory}), gpus, per_host)


@pytest.mark.parametrize('seed', [0, 1, exhaustive(2), *map(exhaustive, range(3, 50))])
def test_the_best_of_a_pruned_search_is_the_best_of_all(seed):
    config, cluster = random_case(seed)
    pruned, full = (search(config, cluster, prune=prune) for prune in (True, False))
    assert pruned.best == full.best
    assert not full.slower
    assert len(pruned.all) == len(full.all)
    for mesh in {choice.mesh for choice in full.fitting}:
        best, same = (
            next(choice for choice in found.fitting if choice.mesh == mesh)
            for found in (full, pruned)
        )
        assert best == same


def test_a_mesh_of_which_some_layout_can_be_is_not_impossible():
    found = ranking(changed(small(), train__batch_size=40), 'h100', 40)
    possible = {choice.mesh[:3] for choice in found.all if choice.mesh.is_flat}
    assert possible == {(40, 1, 1), (20, 1, 2), (10, 1, 4), (10, 2, 2), (5, 2, 4)}
    impossible = {mesh[:3] for mesh in found.impossible if mesh.is_flat}
    assert {mesh for mesh in impossible if mesh[1] == 1} == {
        (8, 1, 5),
        (5, 1, 8),
        (4, 1, 10),
        (2, 1, 20),
        (1, 1, 40),
    }
    assert possible | impossible == {mesh[:3] for mesh in meshes(40, has_grids=True)}


@pytest.mark.parametrize('name', ['bert_336m', 'qwen3_30b_a3b'])
def test_a_layout_is_possible_with_any_recomputation_or_none(name):
    config = with_rows(name, 16)
    for mesh in (Mesh(2, 1, 4), Mesh(4, 1, 1, 2, 1), Mesh(2, 2, 2)):
        for layout in layouts(config, mesh, 8):
            found = [
                MEGAJAX.problems(changed(layout, train__recompute=recompute))
                for recompute in ('none', 'selective', 'full')
            ]
            assert found[0] == found[1] == found[2]


def test_the_reason_says_by_how_much():
    found = ranking(small('train.batch_size=64'), 'h100', 8)
    loser = next(choice for choice in found.fitting if choice.mesh == Mesh(2, 1, 4))
    excess = loser.timed.total / found.best.timed.total - 1
    why = why_slower(loser.timed, found.best.timed)
    assert why.startswith(f'{excess:+.1%}: exposed collectives, model ')


def test_a_mesh_that_cannot_be_says_why():
    found = ranking(small('train.batch_size=64'), 'h100', 8)
    assert {mesh: why for mesh, why in found.impossible.items() if mesh.is_flat} == {
        Mesh(1, 1, 8): (
            'model.num_heads: 12 is not a multiple of mesh.model=8; use 8 or 16, or mesh.model 4'
        )
    }


def test_where_nothing_fits_the_fewest_gpus_that_would_are_named():
    with pytest.raises(ConfigError) as caught:
        ranking(with_rows('llama3_8b', 8), 'h100', 1)
    first, fix, *_ = str(caught.value).splitlines()
    assert first.startswith('no layout fits on 1 x NVIDIA H100 SXM 80 GB: the smallest needs ')
    gpus = int(fix.removeprefix('it fits on ').split()[0])
    assert ranking(with_rows('llama3_8b', 8), 'h100', gpus).fitting
    with pytest.raises(ConfigError):
        ranking(with_rows('llama3_8b', 8), 'h100', gpus // 2)


def test_more_devices_of_one_cpu_have_no_more_memory() -> None:
    config, gpu = with_rows('llama3_8b', 8), hardware('h100').model_copy(update={'memory': 10**10})
    cpu = gpu.model_copy(update={'device_kinds': ('cpu',)})
    fits = [that_fits(config, 64, Cluster.of(record, 8), MEGAJAX) for record in (gpu, cpu)]
    assert [layout is not None for layout in fits] == [True, False]


def test_moments_in_16_bits_are_named_where_they_would_do_and_never_chosen():
    some_rows = changed(load('llama3_8b', ['model.num_layers=24']), train__batch_size=16)
    with pytest.raises(ConfigError) as caught:
        ranking(some_rows, 'h200', 1)
    assert 'with optim.moments_dtype=bfloat16, which rounds ' in str(caught.value)
    rounded = ranking(changed(some_rows, optim__moments_dtype='bfloat16'), 'h200', 1)
    assert rounded.best.config.optim.moments_dtype == 'bfloat16'
    with pytest.raises(ConfigError) as caught:
        ranking(with_rows('llama3_8b', 8), 'h100', 1)
    assert 'moments_dtype' not in str(caught.value)
    found = ranking(with_rows('llama3_8b', 8), 'h100', 8)
    assert {choice.config.optim.moments_dtype for choice in found.all} == {'float32'}


def test_where_nothing_divides_every_mesh_has_its_reason():
    with pytest.raises(ConfigError) as caught:
        ranking(small('mesh.data=1', 'train.batch_size=3', 'train.microbatches=1'), 'h100', 16)
    text = str(caught.value)
    assert 'no mesh of 16 GPUs can train this config' in text
    assert (
        'data=16 x model=1: train.batch_size: 3 is not a multiple of mesh.data=16; use 16' in text
    )
    assert 'data=1 x model=16: model.num_heads: 12 is not a multiple of mesh.model=16' in text


def test_of_many_meshes_that_cannot_be_a_few_have_their_reasons():
    with pytest.raises(ConfigError) as caught:
        ranking(small('mesh.data=1'), 'h100', 720720)
    assert len(caught.value.problems) == 10
    assert str(caught.value).splitlines()[-1] == 'and 232 more meshes'


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'gpus'), [('llama3_70b', 512), ('llama3_8b', 720720)])
def test_many_gpus_are_searched_in_seconds(name, gpus):
    start = time.process_time()
    ranking(changed(load(name), train__batch_size=2 * gpus), 'h100', gpus)
    assert time.process_time() - start < 15  # 2 to 6 on different machines


def test_a_program_without_grids_has_none():
    config = changed(load('gpt3_175b'), train__batch_size=16)
    cluster = Cluster.of(hardware('h200'), 512)
    rows = {
        program: {choice.mesh.rows for choice in search(config, cluster, program).all}
        for program in (MEGAJAX, MEGATRON)
    }
    assert rows == {MEGAJAX: {1, 2, 4, 8, 16}, MEGATRON: {1}}


def test_zero_2_beats_zero_1_in_one_microbatch():
    """It sends as many bytes, hides most of its gradients, and keeps only shards of them."""
    size = 'train.batch_size=8', 'train.microbatches=1', 'mesh.data=8'
    config = load('llama3_8b', [*size, 'train.overlap=none', 'model.num_layers=31'])
    found = search(config, Cluster.of(hardware('b200'), 8), prune=False)
    one, two = (
        next(
            choice
            for choice in found.fitting
            if choice.mesh == Mesh(8, 1, 1)
            and choice.config.optim.shard == rung
            and choice.config.train.recompute == 'full'
        )
        for rung in ('optimizer', 'gradients')
    )
    assert two.timed.total < one.timed.total
    assert one.bytes - two.bytes > 20e9
    sent = [sum(x.wire_bytes for x in choice.timed.transfers) for choice in (one, two)]
    assert sent[0] == sent[1]


def test_one_microbatch_of_zero_1_in_an_order_of_ours_is_zero_2() -> None:
    """Both sum the gradients of a layer beside the backward pass of the next."""
    size = 'train.batch_size=8', 'train.microbatches=1', 'mesh.data=8'
    config = load('llama3_8b', [*size, 'train.recompute=full', 'model.num_layers=31'])
    found = search(config, Cluster.of(hardware('b200'), 8), prune=False)
    one, two = (
        [
            (choice.timed.total, choice.bytes)
            for choice in found.fitting
            if choice.mesh == Mesh(8, 1, 1) and choice.config.optim.shard == shard
        ]
        for shard in ('optimizer', 'gradients')
    )
    assert one == two


@pytest.mark.slow
def test_where_the_network_is_slow_replicas_beat_zero_3_over_hosts():
    config = changed(load('llama3_8b', ['train.overlap=none']), train__batch_size=512)
    fast = Cluster.of(hardware('h100'), 32)
    slow = Cluster.of(slow_network('h100', 2e9), 32)
    found = search(config, slow, prune=False)
    in_hosts, over_hosts = (
        next(
            choice.timed.total
            for choice in found.fitting
            if (choice.mesh, choice.config.optim.shard) == (Mesh(32, 1, 1), 'weights')
            and choice.config.mesh.replicas == replicas
        )
        for replicas in (4, 1)
    )
    assert in_hosts < 0.9 * over_hosts
    assert search(config, fast).best.config.mesh.replicas == 1


def test_a_group_of_replicas_lies_inside_a_host_if_any_can():
    config = changed(load('gpt2_345m'), train__batch_size=64)
    for mesh in (Mesh(64, 1, 1), Mesh(32, 1, 2), Mesh(8, 1, 8)):
        groups = Counter(
            mesh.data // candidate.mesh.replicas * mesh.model
            for candidate in layouts(config, mesh, 8)
            if candidate.mesh.replicas > 1
        )
        if mesh.model == 8:  # a group has one device on each host
            assert set(groups) == {16, 32}
        else:
            assert set(groups) == {2 * mesh.model * 2**i for i in range(3)} & {2, 4, 8}


def test_replicas_within_hosts_are_those_whose_groups_divide_a_host():
    assert replicas_within_hosts(64, 1, 8) == [8, 16, 32, 64]
    assert replicas_within_hosts(8, 8, 8) == [8]
    assert replicas_within_hosts(6, 2, 8) == [3, 6]
    assert replicas_within_hosts(6, 1, 8) == [3, 6]
    assert replicas_within_hosts(4, 16, 8) == []


def test_a_grid_wins_where_many_gpus_share_a_small_batch():
    # A prime number of layers has no pipelines, which are not compared here.
    config = load('gpt3_175b', ['train.overlap=none', 'model.num_layers=97'])
    few, many = (
        next(choice for choice in found.fitting if choice.mesh.is_flat)
        for found in (
            ranking(changed(config, train__batch_size=rows), 'h100', 512) for rows in (32, 128)
        )
    )
    assert few.mesh.rows > 1
    assert many.mesh.rows == 1


@pytest.mark.parametrize(
    ('name', 'grid', 'ratio'),
    [
        ('llama3_8b', (2, 2), 1.42),
        ('megatron_8.3b', (2, 2), 1.33),
        ('gpt3_175b', (2, 2), 1.33),
        ('gpt3_175b', (2, 4), 0.86),
        ('gpt3_175b', (4, 16), 0.38),
    ],
)
def test_a_small_grid_sends_more_than_one_dimension_and_a_large_one_less(name, grid, ratio):
    rows, model = grid
    config = changed(
        load(name),
        mesh__data=1,
        mesh__model_rows=rows,
        mesh__model=model,
        mesh__sequence_parallel=True,
        train__recompute='none',
        train__microbatches=1,
        train__batch_size=16,
        model__dropout=0.0,
    )
    assert grid_ratio(config) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize(
    'more',
    [
        'mesh.context_exchange=all_to_all',
        'mesh.stages=2',
        'optim.shard=weights',
        'train.recompute=full',
        'train.microbatches=8',
        'train.overlap=batch_split',
    ],
)
def test_of_layouts_that_are_equally_fast_the_simplest_is_first(more: str) -> None:
    plain = (
        'mesh.data=2',
        'mesh.context=2',
        'train.microbatches=4',
        'train.overlap=none',
        'optim.shard=optimizer',
    )
    simple, other = (
        SimpleNamespace(
            config=load('llama3_8b', [*plain, 'train.batch_size=16', *overrides]),
            timed=SimpleNamespace(total=1.0),
        )
        for overrides in ((), (more,))
    )
    assert _order(simple) < _order(other)
    other.timed.total = 0.9
    assert _order(other) < _order(simple)
