"""The time of a step: all FLOPs are there, nothing is counted twice, and faster hardware is never
slower.
"""

from collections import defaultdict
from itertools import product

import pytest
from support import make_config

from megajax.analysis.plan.communication import communication
from megajax.analysis.plan.kernel_time import in_parts, product_seconds
from megajax.analysis.plan.launches import LAUNCH, launch_seconds, num_launches
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.overlap import hidden_by
from megajax.analysis.plan.programs import FSDP, MEGATRON
from megajax.analysis.plan.published.programs import MEGATRON_2021
from megajax.analysis.plan.time import Timer, step_time
from megajax.core.config import Config, ConfigError, load
from megajax.core.config.load import presets
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flops import step_flops
from megajax.core.counts.parameters import num_parameters
from megajax.core.counts.products import products
from megajax.core.hardware.records import Hardware, hardware

H100 = hardware('h100')
LLAMA = (
    'mesh.data=4',
    'mesh.model=4',
    'train.batch_size=64',
    'train.microbatches=4',
    'train.recompute=none',
    'mesh.sequence_parallel=true',
    'optim.shard=none',
)
ONE_ROW = 'mesh.data=8', 'train.batch_size=8', 'train.microbatches=1', 'train.recompute=none'


def llama(*overrides: str) -> Config:
    return load('llama3_8b', [*LLAMA, *overrides])


@pytest.mark.parametrize(
    ('name', 'recompute', 'flash', 'mesh'),
    [
        *product(
            ['gpt', 'llama', 'bert'], ['none', 'selective', 'full'], [False, True], [(1, 1), (2, 4)]
        )
    ],
)
def test_the_products_have_the_flops_of_the_step(name, recompute, flash, mesh):
    config = make_config(
        name,
        *mesh,
        sequence_parallel=mesh[1] > 1 and flash,
        train={'recompute': recompute, 'microbatches': 2},
    )
    counted = (
        sum(one.times * one.flops for one in products(config, flash=flash)) * mesh[0] * mesh[1]
    )
    assert counted == step_flops(config, flash=flash).hardware


def test_megatron_computes_the_last_product_of_a_layer_again():
    config = load('megatron_8.3b')
    again, ours = (
        sum(one.times * one.flops for one in products(config, flash=False, recomputes_last=last))
        for last in (True, False)
    )
    down = 2 * 8 * 1024 * (4 * 3072 // 8) * 3072 * 72
    assert again - ours == down


def faster(**figures: object) -> Hardware:
    return H100.model_copy(update=figures)


@pytest.mark.parametrize(
    ('better', 'part'),
    [
        (faster(peak_flops={'bfloat16': 2 * H100.peak_flops['bfloat16']}), 'products'),
        (faster(memory_bandwidth=2 * H100.memory_bandwidth), 'memory_bound'),
        (
            faster(
                inside_host=H100.inside_host.model_copy(
                    update={'bandwidth': 2 * H100.inside_host.bandwidth}
                )
            ),
            'waits',
        ),
        (faster(across_hosts=H100.across_hosts.model_copy(update={'latency': 0.0})), 'waits'),
    ],
    ids=['peak', 'memory', 'links', 'latency'],
)
def test_better_hardware_shortens_its_part(better, part):
    before, after = (step_time(llama(), Cluster.of(gpu, 16)) for gpu in (H100, better))
    seconds = [time.waits() if part == 'waits' else getattr(time, part) for time in (before, after)]
    assert seconds[1] < seconds[0]
    assert after.total < before.total


@pytest.mark.parametrize(
    'overrides',
    [
        (),
        ('mesh.sequence_parallel=true',),
        ('train.overlap=batch_split',),
        ('train.recompute=full',),
    ],
    ids=str,
)
def test_the_parts_make_the_step(overrides):
    time = step_time(llama(*overrides), Cluster.of(H100, 16))
    assert time.total == pytest.approx(
        time.products
        + time.memory_bound
        + time.launches
        + sum(one.exposed for one in time.transfers)
    )
    assert time.share() == pytest.approx(time.share('data') + time.share('model'))
    assert all(0 <= one.hidden <= one.seconds * (1 + 1e-9) for one in time.transfers)
    assert all(one.exposed == one.seconds - one.hidden for one in time.transfers)
    assert 0 < sum(one.hidden for one in time.transfers) <= time.products
    assert time.mfu <= time.hfu < 1
    assert time.days(86400 * time.tokens_per_second) == pytest.approx(1)


@pytest.mark.parametrize('overlap', ['none', 'batch_split'])
@pytest.mark.parametrize('parallel', ['false', 'true'])
def test_what_overlaps_is_hidden_as_far_as_the_products_beside_it_reach(overlap, parallel):
    sizes = 'mesh.data=1', 'mesh.model=4', 'train.batch_size=4', 'train.microbatches=1'
    layout = f'train.overlap={overlap}', f'mesh.sequence_parallel={parallel}'
    fixed = 'train.dtype=bfloat16', 'model.dropout=0.0'
    config = load('gpt2_345m', [*sizes, *layout, *fixed])
    cluster, seconds = Cluster.of(H100, 4), defaultdict[tuple[str, str], float](float)
    for one in products(config, flash=True):
        part = in_parts(one, config.overlap.num_parts)
        seconds[one.name, one.phase] += product_seconds(part, config, cluster)
    limited = 0
    sent = zip(communication(config), step_time(config, cluster).transfers, strict=True)
    for one, transfer in sent:
        share, names, phase, _ = hidden_by(one, config)
        there = sum(seconds[name, phase or transfer.phase] for name in names)
        assert transfer.hidden <= share * min(transfer.seconds, there) * (1 + 1e-9)
        limited += 0 < transfer.hidden < 0.999 * share * transfer.seconds
    assert limited or overlap == 'batch_split'  # the share of the bytes alone would say more


def test_halves_that_take_turns_wait_less():
    plain, turns = (
        step_time(llama(f'train.overlap={overlap}'), Cluster.of(H100, 16))
        for overlap in ('none', 'batch_split')
    )
    assert turns.share('model') < plain.share('model')


def test_one_gpu_waits_for_nothing():
    time = step_time(llama('mesh.data=1', 'mesh.model=1'), Cluster.of(H100, 1))
    assert time.transfers == ()


def test_nothing_of_the_papers_overlaps():
    time = step_time(llama(), Cluster.of(H100, 16), MEGATRON_2021)
    assert all(one.exposed == one.seconds for one in time.transfers)


def test_megatron_core_overlaps_all_that_matmuls_can_hide():
    time = step_time(llama('mesh.sequence_parallel=true'), Cluster.of(H100, 16), MEGATRON)
    for one in time.transfers:
        can_hide = one.axis == 'data' or one.site in ('attention', 'mlp', 'head')
        assert (one.hidden > 0) == can_hide, one


def test_fsdp_sends_all_weights_three_times_a_microbatch():
    config = llama('mesh.data=16', 'mesh.model=1', 'train.microbatches=2')
    time = step_time(config, Cluster.of(H100, 16), FSDP)
    weights = 2 * num_parameters(config.model, padded=True)
    assert sum(one.wire_bytes for one in time.transfers) == pytest.approx(2 * 3 * 15 / 16 * weights)


def test_microbatches_cost_zero_3_its_gathers_and_zero_1_nothing():
    """ZeRO-3 sends everything in each microbatch, ZeRO-2 the sums, ZeRO-1 nothing more."""
    sizes = 'mesh.data=8', 'mesh.model=1', 'train.recompute=full'
    sent = {}
    for shard in ('optimizer', 'gradients', 'weights'):
        for count in (1, 4):
            config = llama(*sizes, f'train.microbatches={count}', f'optim.shard={shard}')
            time = step_time(config, Cluster.of(H100, 8))
            sent[shard, count] = sum(one.wire_bytes for one in time.transfers)
    assert sent['optimizer', 4] == sent['optimizer', 1]
    assert sent['gradients', 4] / sent['gradients', 1] == pytest.approx(3, rel=0.01)
    assert sent['weights', 4] / sent['weights', 1] == pytest.approx(4, rel=0.01)


def test_a_grid_divides_products_among_its_devices():
    one_d, grid = (
        llama('mesh.data=4', *keys, 'mesh.sequence_parallel=true')
        for keys in (('mesh.model=8',), ('mesh.model=4', 'mesh.model_rows=2'))
    )
    counted = [sum(one.times * one.flops for one in products(x, flash=True)) for x in (one_d, grid)]
    assert counted[0] == counted[1]
    cluster = Cluster.of(H100, 32)
    flat, square = (step_time(config, cluster) for config in (one_d, grid))
    assert square.memory_bound == pytest.approx(flat.memory_bound, rel=0.01)
    assert {one.axis for one in square.transfers} == {'row', 'model', 'row+model', 'data'}
    assert all(one.hidden == 0 for one in square.transfers if one.axis != 'data')


def test_each_zero_stage_has_its_own_launches_in_a_timer():
    cluster = Cluster.of(H100, 64)
    timer, few = Timer(cluster), ['train.batch_size=64', 'mesh.data=64', 'mesh.model=1']
    stages = [load('gpt2_345m', [*few, f'optim.shard={shard}']) for shard in ('none', 'weights')]
    steps = [timer.step(config) for config in stages]
    assert steps == [step_time(config, cluster) for config in stages]
    assert 0 < steps[0].launches < steps[1].launches


def test_what_a_timer_shares_between_layouts_changes_none():
    cluster = Cluster.of(H100, 16)
    timer = Timer(cluster)
    configs = [
        llama(f'optim.shard={shard}', f'train.recompute={recompute}', *keys)
        for shard in ('none', 'gradients', 'weights')
        for recompute in ('none', 'full')
        for keys in ((), ('train.overlap=batch_split',), ('mesh.sequence_parallel=true',))
    ]
    for config in configs:
        assert timer.step(config) == step_time(config, cluster)
        assert timer.computing(config) <= timer.at_least(config) <= timer.step(config).total


def test_a_dtype_that_the_gpu_lacks_is_refused():
    with pytest.raises(
        ConfigError,
        match=r'train.dtype=bfloat16: NVIDIA V100 SXM3 32 GB computes in float16, float32',
    ):
        step_time(llama(), Cluster.of(hardware('v100'), 16))


def test_a_small_step_waits_for_its_launches():
    tiny, large = (
        step_time(config, Cluster.of(H100, 8))
        for config in (load('tiny', ['mesh.data=2', 'mesh.model=4']), llama())
    )
    assert tiny.launches > tiny.products + tiny.memory_bound
    assert large.launches < 0.05 * large.total


def test_sequence_parallelism_on_one_device_changes_no_launch():
    alone, parallel = (
        load('llama3_8b', ['mesh.model=1', f'mesh.sequence_parallel={value}', *ONE_ROW])
        for value in ('false', 'true')
    )
    assert num_launches(alone) == num_launches(parallel)


def test_a_kernel_takes_its_work_or_its_launch():
    assert launch_seconds([(10, 1.0)], 10) == 0
    assert launch_seconds([(10, 4 * LAUNCH)], 10) == pytest.approx(6 * LAUNCH)
    assert launch_seconds([(10, 4 * LAUNCH), (10, 1.0)], 60) == pytest.approx(26 * LAUNCH)


@pytest.mark.parametrize('name', ['llama3_8b', 'llama3_70b', 'qwen3_30b_a3b'])
def test_an_h200_is_faster_than_an_h100_by_its_memory_alone(name: str) -> None:
    config = load(name)
    h100, h200 = (
        step_time(config, Cluster.of(hardware(gpu), config.mesh.num_devices))
        for gpu in ('h100', 'h200')
    )
    # The matmul of a router waits for memory.
    assert h200.products == pytest.approx(h100.products, rel=5e-3)
    assert h200.waits() == pytest.approx(h100.waits(), rel=0.02, abs=1e-3)
    assert h100.memory_bound / h200.memory_bound == pytest.approx(4.8 / 3.35)


def test_no_preset_gains_more_on_an_h200_than_its_memory_explains() -> None:
    """Matmuls of attention with dropout wait for memory, and all matmuls of a tiny model do."""
    for name in presets():
        config = resolved(load(name), on_gpu=True)
        h100, h200 = (
            step_time(config, Cluster.of(hardware(gpu), config.mesh.num_devices))
            for gpu in ('h100', 'h200')
        )
        bandwidth = 4.8 / 3.35
        assert h100.memory_bound / h200.memory_bound == pytest.approx(bandwidth), name
        assert 1 <= h100.products / h200.products <= bandwidth, name
        # Matmuls that take less time hide less of a transfer.
        exposed = h200.waits() - h100.waits()
        assert -1e-9 <= exposed <= h100.products - h200.products + 1e-9, name
        assert 0.99 <= h100.total / h200.total <= bandwidth, name
