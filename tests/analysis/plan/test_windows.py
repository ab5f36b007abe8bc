"""What sliding windows and patterns of layers change in a plan."""

import csv
import itertools
import re
from pathlib import Path

import pytest
from support import load_script

import megajax
from megajax.analysis.plan.kernel_time import product_seconds
from megajax.analysis.plan.layouts import deep_layouts, deep_meshes
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.memory_traffic import traffic_of_layers
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import MEGAJAX, MEGATRON
from megajax.analysis.plan.sizes import Sizes
from megajax.analysis.plan.time import step_time
from megajax.analysis.plan.verdicts import on_windows
from megajax.core.config import Config
from megajax.core.config.overlap_rules import resolved
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.megatron import expected
from megajax.core.counts.products import products
from megajax.core.hardware.records import hardware

RESULTS = Path(__file__).parents[3] / 'benchmarks/results/2026-11-30_windows.csv'
LINES = [*csv.DictReader(RESULTS.open(newline=''))]
GEMMA = 'model.layers=[{repeat: 5, window: 1024, rope_theta: 1e4}, {rope_theta: 1e6}]'


def llama(*overrides: str) -> Config:
    return megajax.load('llama3_8b', ['train.seq_len=8192', *overrides])


def config_of(line: dict[str, str]) -> Config:
    config = load_script('windows').load(line['overrides'])
    return resolved(config, on_gpu=line['target'] != 'cpu')


every_line = pytest.mark.parametrize(
    'line', LINES, ids=lambda line: f'{line["target"]} {line["overrides"]}'
)


@every_line
def test_the_flops_of_a_step_with_windows_are_those_of_its_program(line: dict[str, str]) -> None:
    config, is_gpu = config_of(line), line['target'] != 'cpu'
    work = products(config, flash=is_gpu and uses_flash(config))
    gflops = sum(product.times * product.flops for product in work) / 1e9
    assert gflops == pytest.approx(float(line['compiled_gflops']), rel=1e-6)


@every_line
def test_the_memory_of_a_pattern_is_predicted_within_six_percent(line: dict[str, str]) -> None:
    config = config_of(line)
    if line['target'] == 'cpu' or config.model.num_layers == 1:
        return
    needed = memory(config, capacity_bytes=hardware('h100').memory).total
    assert needed == pytest.approx(int(line['compiled_bytes']), rel=0.06)


@pytest.mark.parametrize('target', ['h100', 'cpu'])
def test_temporaries_and_flops_of_a_layer_with_a_window_grow_linearly(target: str) -> None:
    lines = [x for x in LINES if x['target'] == target and ' num_layers' in f' {x["overrides"]}']
    one_layer = [x for x in lines if 'num_layers=1 ' in x['overrides']]
    windowed = [x for x in one_layer if ' window=' in x['overrides']]
    whole = [x for x in one_layer if ' window=' not in x['overrides']]
    for figure in ('temporaries', 'compiled_gflops'):
        first, second = (
            (float(b[figure]) - float(a[figure])) / (length(b) - length(a))
            for a, b in itertools.pairwise(windowed)
        )
        assert second == pytest.approx(first, rel=0.03)
    shortest, *_, longest = (float(x['compiled_gflops']) / length(x) for x in whole)
    assert longest > 2 * shortest


def length(line: dict[str, str]) -> int:
    found = re.search(r'train\.seq_len=(\d+)', line['overrides'])
    assert found
    return int(found[1])


@pytest.mark.parametrize(('layers', 'stages'), [(24, {1, 2, 4}), (36, {1, 2, 3, 6}), (26, {1})])
def test_a_search_gives_each_stage_and_chunk_whole_periods(layers: int, stages: set[int]) -> None:
    config = llama(GEMMA, f'model.num_layers={layers}', 'optim.shard=none', 'mesh.data=1')
    config = config.model_copy(
        update={'train': config.train.model_copy(update={'batch_size': 72, 'microbatches': 1})}
    )
    meshes = [mesh for mesh in deep_meshes(config, 72, 8) if mesh.context == 1]
    assert {1, *(mesh.stages for mesh in meshes)} == stages
    for mesh in meshes:
        for layout in deep_layouts(config, mesh, 8):
            assert 'model.layers' not in {problem.path for problem in incompatibilities(layout)}


def test_scores_are_counted_by_block_where_there_is_no_flash_kernel() -> None:
    pattern = 'model.layers=[{repeat: 3, window: 1024}, {}]'
    config = llama(pattern, 'train.dtype=float32')
    whole, ours = (Sizes(each) for each in (llama('train.dtype=float32'), config))
    # Two blocks of 1,024 keys instead of 8,192, in three of four layers.
    assert ours.scores / whole.scores == (3 * 2048 + 8192) / (4 * 8192)
    assert ours.most_scores == whole.most_scores == whole.scores
    softmax = [
        next(x.bytes for x in traffic_of_layers(each.config, flash=False) if x.name == 'softmax')
        for each in (ours, whole)
    ]
    assert softmax[0] / softmax[1] == ours.scores / whole.scores


def test_a_pattern_that_is_compiled_layer_by_layer_needs_no_more_memory() -> None:
    unrolled = 'train.unroll=true'
    with_it, without = (memory(llama(*keys, unrolled)) for keys in ((GEMMA,), ()))
    assert with_it == without


def test_attention_in_a_window_is_as_efficient_as_in_a_sequence_of_as_many_keys() -> None:
    cluster = Cluster.of(hardware('h100'), 1)
    window, short = llama('model.window=1024'), llama('train.seq_len=2048')
    (windowed,), (whole,) = (
        [x for x in products(each, flash=True) if x.flash and x.phase == 'forward']
        for each in (window, short)
    )
    per_flop = [
        product_seconds(product, config, cluster) / (product.times * product.flops)
        for product, config in ((windowed, window), (whole, short))
    ]
    assert per_flop[0] == pytest.approx(per_flop[1], rel=0.05)


def test_megatron_sends_as_much_with_windows_as_without() -> None:
    assert expected(llama(GEMMA)) == expected(llama())


def test_a_plan_says_what_windows_save() -> None:
    cluster = Cluster.of(hardware('h100'), 64)
    for program in (MEGAJAX, MEGATRON):
        config = llama(GEMMA)
        saved = on_windows(config, step_time(config, cluster, program), cluster, program)
        assert saved is not None
        assert saved.startswith('in 27 of 32 layers: attention takes ')
        assert re.search(r'without them the step takes \d+\.\d% longer$', saved)
    config = llama()
    assert on_windows(config, step_time(config, cluster), cluster, MEGAJAX) is None


def test_the_verdict_halves_only_the_blocks_with_a_causal_mask() -> None:
    """Without windows, a shard's own block is causal; the others are half as large, unmasked."""
    cluster = Cluster.of(hardware('h100'), 64)
    found = []
    for context in (1, 4):
        config = llama(GEMMA, f'mesh.context={context}', 'mesh.data=1', 'mesh.model=1')
        said = on_windows(config, step_time(config, cluster), cluster, MEGAJAX)
        assert said is not None
        found += re.findall(r'([\d,.]+) without windows', said)
    whole, of_shard = (float(flops.replace(',', '')) for flops in found)
    assert 4 * of_shard == pytest.approx(whole, rel=0.01)
