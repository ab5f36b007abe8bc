"""The pattern of layers: what each layer's config is, and which patterns are rejected."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.config import ConfigError, LayerConfig, ModelConfig, dump, load, reload
from megajax.core.config.layer import shortest_pattern

GEMMA = 'model.layers=[{repeat: 2, window: 8, rope_theta: 1e4}, {rope_theta: 1e6}]'
ROPE = 'model.position=rope'
SIZES = {'hidden_size': 8, 'num_heads': 1, 'vocab_size': 1, 'max_seq_len': 8}


def tiny(*overrides: str) -> ModelConfig:
    return load('tiny', [ROPE, 'model.num_layers=7', *overrides]).model


def test_the_pattern_repeats_and_its_last_repetition_may_be_cut() -> None:
    model = tiny(GEMMA, 'model.rope_theta=5')
    found = [(model.layer_config(i).window, model.layer_config(i).rope_theta) for i in range(7)]
    local, full = (8, 1e4), (None, 1e6)
    assert found == [local, local, full, local, local, full, local]


def test_a_layer_has_the_keys_of_the_model_that_its_entry_leaves_out() -> None:
    model = tiny('model.layers=[{}, {window: null}, {position: none}]', 'model.window=16')
    assert [(layer.window, layer.position) for layer in model.pattern] == [
        (16, 'rope'),
        (None, 'rope'),
        (16, 'none'),
    ]


def test_without_a_pattern_all_layers_have_the_config_of_the_model() -> None:
    model = tiny('model.window=16')
    assert model.pattern == (model,)


def test_a_config_is_equal_after_it_was_written_and_read() -> None:
    config = load('tiny', [ROPE, 'model.layers=[{window: null}, {repeat: 1}]', 'model.window=16'])
    again = reload(config.model_dump(mode='json'), place='record')
    assert again == config
    assert again.model.pattern == config.model.pattern
    assert 'window: null' in dump(config)


def test_null_and_a_key_that_is_left_out_differ() -> None:
    assert LayerConfig(window=None) != LayerConfig()
    assert hash(LayerConfig(window=None)) != hash(LayerConfig())
    assert LayerConfig(repeat=1) == LayerConfig()


@pytest.mark.parametrize(
    ('overrides', 'words'),
    [
        (
            ['model.layers=[{repeat: 8}]'],
            [
                'model.layers',
                '8 layers',
                'num_layers=7',
                'at most 7, or model.num_layers at least 8',
            ],
        ),
        (
            ['model.layers=[{window: 0}]'],
            ['model.layers', '[0].window', 'greater than 0', 'mean null'],
        ),
        (['model.layers=24'], ['model.layers', 'a list', 'num_layers=24']),
        (
            ['model.window=0'],
            ['model.window', 'greater than 0', 'did you mean null, for no window?'],
        ),
        (
            ['model.layers=[{windows: 4}]'],
            ['[0].windows is not a key of a layer', 'repeat, window, '],
        ),
        (
            ['model.layers=[{}, {rope_scaling: {type: yarn, factor: 2}}]'],
            ['model.layers: [1].rope_scaling: yarn needs original_max_seq_len'],
        ),
        (['model.layers=[{}, {window: -1}]'], ['model.layers: [1].window must be greater']),
        (
            ['model.rope_theta=5e5', 'model.layers=[{position: none}]'],
            ['model.rope_theta: 500000.0 has no effect', 'or set model.layers=[]'],
        ),
        (['model.layers=4'], ['model.layers: must be a list', 'model.num_layers=4?']),
        (
            ['model.layers=[{}, {position: none, rope_theta: 1e6}]'],
            ['model.layers: [1] has no positions, so rope_theta has no effect; remove it'],
        ),
        (
            ['model.layers=[{rope_scaling: {type: linear, factor: 2}}]', 'model.position=none'],
            ['model.layers: [0] has no positions, so rope_scaling has no effect'],
        ),
        (
            ['model.rope_scaling={type: linear, factor: 2}', 'model.position=none'],
            ['model.rope_scaling: has no effect, because no layer has rotary'],
        ),
        (
            ['model.layers=[{window: 4}]', 'model.attention=bidirectional'],
            ['model.window', 'causal'],
        ),
        (
            ['model.layers=[{rope_theta: 1e6}]', 'model.position=learned'],
            ['model.layers', 'rope_theta', 'model.position=rope'],
        ),
        (
            ['model.layers=[{repeat: 2}, {window: 8}]', 'mesh.stages=7', 'mesh.data=1'],
            ['model.layers', '3 layers', 'mesh.stages'],
        ),
        (
            ['model.layers=[{}, {window: 17}]', 'mesh.context=4', 'mesh.data=1'],
            [
                'model.layers',
                '17 tokens',
                'at most 16, mesh.context_exchange=all_to_all, mesh.context 2',
                'train.seq_len at least 136',
            ],
        ),
        (
            ['model.window=40', 'mesh.context=2', 'mesh.data=1'],
            [
                'model.window',
                'at most 32, mesh.context_exchange=all_to_all, mesh.context 1',
                'train.seq_len at least 160',
            ],
        ),
    ],
)
def test_what_cannot_be_run_is_rejected_with_its_key_and_a_fix(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        tiny(*overrides)
    for word in words:
        assert word in str(error.value)


@given(
    st.lists(st.sampled_from([{}, {'window': 4}, {'window': None}]), min_size=1, max_size=6),
    st.integers(1, 20),
)
def test_the_shortest_pattern_gives_every_layer_its_settings(
    period: list[dict[str, Any]], number: int
) -> None:
    layers = [period[index % len(period)] for index in range(number)]
    pattern = shortest_pattern(layers)
    config = ModelConfig(**SIZES, num_layers=number, window=9, layers=pattern)
    for index, settings in enumerate(layers):
        assert config.layer_config(index).window == settings.get('window', 9)
    assert len(config.pattern) <= len(period)
    entries = [{**entry, 'repeat': 1} for entry in pattern]
    assert all(one != other for one, other in pairwise(entries))


def test_a_pattern_is_not_longer_than_what_repeats() -> None:
    local, full = {'window': 4}, {}
    assert shortest_pattern([local] * 4) == [local]
    assert shortest_pattern([local, local, full] * 2 + [local]) == [local | {'repeat': 2}, full]
