"""The smaller model that `inspect --run` executes keeps every kind of layer."""

import pytest
from support import make_config

from megajax.analysis.inspect.shrink import shrink
from megajax.core.config import Config

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
