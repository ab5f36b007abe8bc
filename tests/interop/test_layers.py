"""Types of layers in config.json are read as the shortest pattern, and written back."""

import importlib.util
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interop.stored import DATA, config_of
from support import by_name, on_mesh

from megajax.core.config import ConfigError, ModelConfig, load
from megajax.interop.huggingface.families import read_family, write_family
from megajax.interop.huggingface.layers import FULL, SLIDING
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import (
    from_huggingface,
    huggingface_pieces,
    tensors_of_pieces,
)
from megajax.interop.pieces import cut, place, shapes_of
from megajax.runtime.checkpoint.open import abstract_params


def keys_of(name: str, **keys: Any) -> dict[str, Any]:
    stored = json.loads((DATA / name / 'config.json').read_text())
    return {key: x for key, x in stored.items() if key != 'layer_types'} | keys


def model_of(name: str, **keys: Any) -> ModelConfig:
    return ModelConfig(**read_family(keys_of(name, **keys), 'config.json')[1])


QWEN = {'use_sliding_window': True, 'sliding_window': 8, 'num_hidden_layers': 6}


@pytest.mark.parametrize(
    ('name', 'keys', 'windows'),
    [
        ('mistral', {'sliding_window': 8}, [8, 8]),
        ('phi3', {'sliding_window': 8}, [8, 8]),
        ('qwen2', {**QWEN, 'max_window_layers': 4}, [None] * 4 + [8] * 2),
        ('qwen2', {**QWEN, 'max_window_layers': 0}, [8] * 6),
        ('qwen2', {**QWEN, 'max_window_layers': 9}, [None] * 6),
        ('qwen2', {**QWEN, 'sliding_window': None, 'max_window_layers': 0}, [None] * 6),
        ('qwen2', {**QWEN, 'use_sliding_window': False, 'max_window_layers': 0}, [None] * 6),
        ('qwen3', {**QWEN, 'layer_types': [SLIDING, FULL] * 3}, [8, None] * 3),
    ],
)
def test_windows_are_those_of_transformers_and_are_written_back(
    name: str, keys: dict[str, Any], windows: list[int | None]
) -> None:
    model = model_of(name, **keys)
    assert [layer.window for layer in model.layer_configs] == windows
    family, written = write_family(model, keys_of(name)['model_type'])
    assert ModelConfig(**read_family(written, '')[1]) == model
    assert family == written['model_type']


@pytest.mark.parametrize(
    ('name', 'keys', 'message'),
    [
        ('qwen2', {'layer_types': ['chunked_attention', FULL]}, '"chunked_attention": only'),
        ('qwen2', {'layer_types': [FULL]}, '["full_attention"]: 1 layers, but num_hidden_layers'),
        ('qwen2', {'layer_types': [SLIDING, FULL]}, '"sliding_attention": needs a sliding_window'),
        (
            'qwen2',
            {**QWEN, 'sliding_window': 0},
            'sliding_window: must be greater than 0, not 0; did you mean null, for no window?',
        ),
        ('qwen2', {**QWEN, 'max_window_layers': None}, 'max_window_layers: null: only a number'),
        ('qwen2', {**QWEN, 'max_window_layers': -1}, 'max_window_layers: -1: only a number'),
        ('qwen2', {'use_sliding_window': 'yes'}, 'use_sliding_window: "yes": only true or false'),
        ('mistral', {'sliding_window': 8, 'layer_types': [SLIDING, FULL]}, 'type "ministral"'),
        ('llama2', {'layer_types': [SLIDING, FULL]}, '"sliding_attention": only "full_attention"'),
    ],
)
def test_layers_that_cannot_be_represented_are_rejected_by_key(
    name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        model_of(name, **keys)
    assert message in str(error.value)
    assert any(f'config.json: {key}: ' in str(error.value) for key in keys)


@pytest.mark.parametrize(
    ('preset', 'family', 'scale'),
    [
        ('gemma3_1b', 'gemma3_text', 256),
        ('gemma3_27b', 'gemma3_text', 168),
        ('olmo3_7b', 'olmo3', None),
    ],
)
def test_a_preset_is_written_as_its_family(preset: str, family: str, scale: int | None) -> None:
    model = load(preset).model
    chosen, keys = write_family(model)
    assert (chosen, keys.get('query_pre_attn_scalar')) == (family, scale)
    assert ModelConfig(**read_family(keys, '')[1]) == model


@pytest.mark.parametrize('types', [{}, {'layer_types': None}])
@pytest.mark.parametrize('period', ['LLLG', 0])
def test_a_period_that_is_no_number_is_rejected_unless_types_are_given(
    types: dict[str, Any], period: Any
) -> None:
    exaone = {'model_type': 'exaone4', 'architectures': None, 'sliding_window': 8}
    exaone |= {'sliding_window_pattern': period}
    with pytest.raises(ConfigError, match=r'sliding_window_pattern: .*: only a number of layers'):
        model_of('olmo2', **exaone, **types)
    model = model_of('olmo2', **exaone, layer_types=[FULL, SLIDING])
    assert [layer.window for layer in model.layer_configs] == [None, 8]


def accepted_by_transformers(keys: dict[str, Any]) -> None:
    if importlib.util.find_spec('transformers'):
        from transformers import AutoConfig

        AutoConfig.for_model(**json.loads(json.dumps(keys)))


@pytest.mark.parametrize('name', ['gemma3', 'olmo3'])
def test_windows_in_all_layers_are_written_with_a_rope_of_full_attention(name: str) -> None:
    rope = {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e4}
    types = [SLIDING] * keys_of(name)['num_hidden_layers']
    model = model_of(name, layer_types=types, rope_parameters={SLIDING: rope})
    assert (model.rope_scaling or model.layer_configs[0].rope_scaling) is not None
    _, keys = write_family(model, keys_of(name)['model_type'])
    # transformers 5 adds rope_scaling to it, and otherwise raises KeyError.
    assert keys['rope_parameters'] == {FULL: rope, SLIDING: rope}
    again = ModelConfig(**read_family(keys, '')[1])
    assert again.layer_configs == model.layer_configs
    accepted_by_transformers(keys)


@pytest.mark.parametrize(
    ('preset', 'family'), [('llama3_8b', 'mistral'), ('gemma3_1b', None), ('gpt2_124m', None)]
)
def test_heads_that_do_not_divide_the_hidden_size_are_written_as_a_family_that_has_them(
    preset: str, family: str | None
) -> None:
    model = load(preset).model
    sizes = {'num_heads': 10, 'num_kv_heads': 5, 'head_dim': 64, 'hidden_size': 576}
    if preset == 'gpt2_124m':
        sizes |= {'num_kv_heads': 10, 'head_dim': 57}
    model = model.model_copy(update=sizes | {'query_scale': sizes['head_dim'] ** -0.5})
    if family is None:
        with pytest.raises(ConfigError, match=r'(num_attention_heads|n_head): 10: does not divide'):
            write_family(model)
        return
    chosen, keys = write_family(model)
    assert chosen == family
    accepted_by_transformers(keys)


@pytest.mark.parametrize(('preset', 'scale'), [('gemma3_1b', 34.0), ('gemma3_27b', 73.5)])
def test_the_scale_that_transformers_rounds_to_bfloat16_is_written(
    preset: str, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(preset).model
    assert np.float32(model.embedding_scale).astype(ml_dtypes.bfloat16) == scale
    expected = write_family(model)
    assert not caplog.text
    assert write_family(model.model_copy(update={'embedding_scale': scale})) == expected
    assert f'embedding_scale={scale:g}: config.json has no key for it' in caplog.text
    other = model.model_copy(update={'embedding_scale': scale + 0.25})
    with pytest.raises(ConfigError, match=r'gemma3_text does not support model\.embedding_scale='):
        write_family(other)


def test_a_family_without_windows_is_not_chosen_for_them() -> None:
    model = model_of('mistral', sliding_window=8)
    assert write_family(model)[0] == 'mistral'
    with pytest.raises(ConfigError, match=r'llama does not support model\.window=8$'):
        write_family(model, 'llama')


def test_attention_sinks_that_config_json_does_not_have_are_named() -> None:
    config, name = config_of('mistral'), 'model.layers.0.self_attn.sinks'
    tensors = read_tensors(DATA / 'mistral') | {name: np.zeros(4, np.float32)}
    wrong = (
        rf'unexpected tensors \(1; config.json decides which tensors exist\): {name}; remove them'
    )
    with on_mesh(config), pytest.raises(ConfigError, match=wrong):
        from_huggingface(config, tensors, source='mistral')


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
def test_adjacent_rotary_pairs_become_halves_of_a_head_and_come_back(dtype: Any) -> None:
    """Of the 8 dims of a head the first 4 are rotated."""
    config, name = config_of('glm4', data=2, model=2), 'model.layers.1.self_attn.k_proj.weight'
    model, tensors = config.model, read_tensors(DATA / 'glm4')
    named = tensors_of_pieces(
        model,
        pieces := huggingface_pieces(model, shapes_of(model), family='glm4'),
        {name: x.astype(dtype) for name, x in tensors.items()},
        source='',
        family='glm4',
    )
    with on_mesh(config):
        params = by_name(place(abstract_params(config), pieces, named, of=''))
    qkv_LDKCH = np.asarray(params['layers.attention.qkv.weight'])
    key_HD = named[name].astype(np.float32)[:8]  # of the first head
    np.testing.assert_array_equal(qkv_LDKCH[1, :, 0, -2].T, key_HD[[0, 2, 1, 3, 4, 5, 6, 7]])
    for path, group in pieces.items():
        for piece in group:
            back = cut(np.asarray(params[path]), piece, np.dtype(dtype))
            assert back.tobytes() == named[piece.name].tobytes(), piece.name
