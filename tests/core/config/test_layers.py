"""The pattern of layers: what each layer's config is, and which patterns are rejected."""

import pytest

from megajax.core.config import ConfigError, LayerConfig, ModelConfig, dump, load, reload

GEMMA = 'model.layers=[{repeat: 2, window: 8, rope_theta: 1e4}, {rope_theta: 1e6}]'
ROPE = 'model.position=rope'


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
        (['model.layers=[{repeat: 8}]'], ['model.layers', '8 layers', 'num_layers=7', 'at most 7']),
        (['model.layers=[{window: 0}]'], ['model.layers', 'window', 'greater than 0', '0']),
        (['model.layers=24'], ['model.layers', 'a list', 'num_layers=24']),
        (['model.window=0'], ['model.window', 'greater than 0']),
        (['model.layers=[{windows: 4}]'], ['model.layers: [0].windows is not a key']),
        (['model.layers=[{}, {window: -1}]'], ['model.layers: [1].window must be greater']),
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
        (['model.layers=[{window: 4}]', 'model.attention=bidirectional'], ['window', 'causal']),
        (
            ['model.layers=[{rope_theta: 1e6}]', 'model.position=learned'],
            ['model.layers', 'rope_theta', 'model.position=rope'],
        ),
        (
            ['model.layers=[{repeat: 2}, {window: 8}]', 'mesh.stages=7', 'mesh.data=1'],
            ['model.layers', '3 layers', 'mesh.stages'],
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
