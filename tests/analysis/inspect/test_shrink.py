"""The smaller model that `inspect --run` executes keeps every kind of layer."""

import operator

import pytest
from support import make_config

from megajax.analysis.inspect.shrink import shrink
from megajax.core.config import Config, load

LOCAL = {'repeat': 5, 'window': 1024, 'rope_theta': 1e4}
GEMMA = [LOCAL, {'rope_theta': 1e6}]
SIZES = {'hidden_size': 1152, 'num_kv_heads': 1, 'max_seq_len': 8192}
TRAIN = {'batch_size': 32, 'microbatches': 4, 'seq_len': 8192}


def large(layers: list[dict], num_layers: int, **mesh: int) -> Config:
    model = SIZES | {'layers': layers, 'num_layers': num_layers}
    return make_config('llama', model=model, mesh={'data': 8} | mesh, train=TRAIN)


def test_two_periods_and_one_of_the_layers_left_over_are_kept() -> None:
    config = large(GEMMA, 26)
    shrunk, changes = shrink(config)
    model = shrunk.model
    kinds = [(model.layer_config(i).window, model.layer_config(i).rope_theta) for i in range(5)]
    local, full = (16, 1e4), (None, 1e6)
    assert (model.num_layers, kinds) == (5, [local, full, local, full, local])
    assert 'model.num_layers 26 -> 5' in changes
    assert changes[-1].startswith('model.layers [{repeat: 5, window: 1024, ')


@pytest.mark.parametrize(('chunks', 'periods'), [(1, 2), (2, 1)])
def test_a_chunk_of_each_stage_has_at_most_two_periods(chunks: int, periods: int) -> None:
    shrunk, _ = shrink(large(GEMMA, 48, data=2, stages=4, virtual_stages=chunks))
    assert shrunk.mesh.stages == 4
    assert shrunk.model.num_layers == 4 * chunks * periods * len(GEMMA)


def test_a_pattern_as_long_as_the_model_keeps_one_layer_of_each_entry() -> None:
    shrunk, _ = shrink(large([{'repeat': 28}, {'repeat': 8, 'window': 4096}], 36))
    assert [layer.window for layer in shrunk.model.pattern] == [None, 32]
    assert shrunk.model.num_layers == 2


@pytest.mark.parametrize(('window', 'shrunk'), [(1, 1), (512, 16), (6144, 48), (9000, 9000)])
def test_a_window_is_a_quarter_of_the_shorter_sequence_or_its_share_of_the_longer_one(
    window: int, shrunk: int
) -> None:
    assert shrink(large([{'window': window}], 4))[0].model.layers[0].window == shrunk


def test_a_head_keeps_a_divisor_for_each_rotary_pair() -> None:
    divisors = (1.0,) * 48
    longrope = {'type': 'longrope', 'factor': 32.0, 'original_max_seq_len': 8192}
    longrope |= {'short_factor': divisors, 'long_factor': divisors}
    model = {'head_dim': 96, 'num_layers': 26}
    for keys in ({'rope_scaling': longrope}, {'layers': [LOCAL, {'rope_scaling': longrope}]}):
        config = make_config('llama', model=SIZES | model | keys, mesh={'data': 8}, train=TRAIN)
        assert shrink(config)[0].model.head_dim == 96


def test_a_small_model_is_executed_with_its_pattern() -> None:
    config = make_config('windows')
    assert shrink(config) == (config, [])


@pytest.mark.parametrize(
    ('name', 'mesh', 'shards', 'experts'),
    [
        ('qwen3_30b_a3b', {'data': 64, 'experts': 8}, (16, 8), (16, 2, 64)),
        ('qwen3_235b_a22b', {'data': 256, 'experts': 128}, (16, 8), (8, 2, 64)),
        ('mixtral_8x7b', {'data': 32, 'experts': 8, 'model': 8}, (2, 2), (4, 2, 512)),
        ('gpt_oss_20b', {'data': 4, 'experts': 4, 'model': 4}, (4, 4), (8, 2, 4 * 80)),
        ('gpt_oss_20b', {'data': 16, 'experts': 1, 'model': 1}, (16, 1), (8, 2, 64)),
    ],
)
def test_devices_keep_several_experts_or_one_and_the_kind_of_matmul(
    name: str, mesh: dict[str, int], shards: tuple[int, int], experts: tuple[int, int, int]
) -> None:
    keys = [f'mesh.{axis}={size}' for axis, size in mesh.items()]
    shrunk, _ = shrink(load(name, [*keys, 'model.num_layers=4']))
    small = shrunk.model.experts
    assert (shrunk.mesh.data, shrunk.mesh.experts) == shards
    assert (small.count, small.active, small.ffn_size) == experts


def test_groups_of_experts_and_of_tokens_stay_several() -> None:
    of_deepseek = ['count=256', 'groups=8', 'active_groups=4', 'shared_ffn_size=2048']
    of_deepseek += ['capacity=1.0', 'capacity_group=512', 'first_dense=3']
    keys = [f'model.experts.{key}' for key in of_deepseek]
    shrunk, changes = shrink(load('qwen3_30b_a3b', [*keys, 'model.ffn_size=6144']))
    small = shrunk.model.experts
    assert (small.count, small.groups, small.active_groups, small.active) == (16, 8, 4, 2)
    assert (small.first_dense, small.shared_ffn_size, small.capacity_group) == (1, 256, 32)
    assert 'model.experts.count 256 -> 16' in changes


@pytest.mark.parametrize(
    ('name', 'keys', 'kept'),
    [
        ('qwen3_vl_2b', ['vision.images=20'], {'vision.images': 16, 'vision.max_patches': 4}),
        ('qwen3_vl_2b', ['vision.images=2'], {'vision.images': 2, 'vision.max_patches': 32}),
        (
            'arr_coc_32b',
            ['relevance.regions=[1, 1]', 'relevance.total_tokens=400', 'vision.max_patches=1600'],
            {'relevance.regions': (1, 1), 'vision.max_patches': 1600, 'vision.images': 1},
        ),
        (
            'arr_coc_32b',
            ['vision.images=3', 'train.seq_len=12800'],
            {'relevance.regions': (2, 1), 'vision.max_patches': 3200, 'vision.images': 2},
        ),
        (
            'arr_coc_32b',
            [
                'relevance.regions=[1, 1]',
                'relevance.total_tokens=64',
                'vision.max_patches=1600',
                'train.seq_len=96',
            ],
            {'relevance.total_tokens': 64, 'train.seq_len': 96},
        ),
        (
            'llama3_8b',
            ['model.head_dim=80', 'model.rotary_fraction=0.4'],
            {'model.head_dim': 80, 'model.rotary_dim': 32},
        ),
        ('llama3_8b', ['model.rotary_fraction=0.5'], {'model.head_dim': 64}),
    ],
)
def test_a_valid_config_stays_valid(name: str, keys: list[str], kept: dict[str, object]) -> None:
    shrunk, _ = shrink(load(name, keys))
    assert {path: operator.attrgetter(path)(shrunk) for path in kept} == kept
