"""Types of layers in config.json are read as the shortest pattern, and written back."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from interop.stored import DATA, config_of
from support import on_mesh

from megajax.core.config import ConfigError, ModelConfig
from megajax.interop.huggingface.families import read_family, write_family
from megajax.interop.huggingface.layers import FULL, SLIDING, pattern
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import from_huggingface

SIZES = {'hidden_size': 16, 'num_heads': 4, 'vocab_size': 50, 'max_seq_len': 32}
KINDS: list[dict[str, Any]] = [{}, {'window': 8}, {'position': 'none'}]
LAYERS = st.lists(st.sampled_from(KINDS), min_size=1, max_size=6)


@given(LAYERS, st.integers(1, 40))
def test_a_pattern_gives_each_layer_its_keys(period: list[dict[str, Any]], number: int) -> None:
    layers = [period[i % len(period)] for i in range(number)]
    entries = pattern(layers)
    model = ModelConfig(**SIZES, position='rope', num_layers=number, layers=entries)
    for i, keys in enumerate(layers):
        expected = {'window': None, 'position': 'rope', **keys}
        assert {key: getattr(model.layer_config(i), key) for key in expected} == expected
    assert len(model.pattern) <= len(period)
    keys_of_entries = [{**entry, 'repeat': 1} for entry in entries]
    assert all(one != other for one, other in pairwise(keys_of_entries))


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
    assert [model.layer_config(i).window for i in range(model.num_layers)] == windows
    family, written = write_family(model, keys_of(name)['model_type'])
    assert ModelConfig(**read_family(written, '')[1]) == model
    assert family == written['model_type']


@pytest.mark.parametrize(
    ('name', 'keys', 'message'),
    [
        ('qwen2', {'layer_types': ['chunked_attention', FULL]}, '"chunked_attention": only'),
        ('qwen2', {'layer_types': [FULL]}, '["full_attention"]: 1 layers, but num_hidden_layers'),
        ('qwen2', {'layer_types': [SLIDING, FULL]}, '"sliding_attention": needs a sliding_window'),
        ('qwen2', {**QWEN, 'sliding_window': 0}, 'sliding_window: must be greater than 0, not 0'),
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


def test_a_family_without_windows_is_not_chosen_for_them() -> None:
    model = model_of('mistral', sliding_window=8)
    assert write_family(model)[0] == 'mistral'
    with pytest.raises(ConfigError, match=r'llama does not support model\.window=8$'):
        write_family(model, 'llama')


def test_attention_sinks_that_config_json_does_not_have_are_named() -> None:
    config, name = config_of('mistral'), 'model.layers.0.self_attn.sinks'
    tensors = read_tensors(DATA / 'mistral') | {name: np.zeros(4, np.float32)}
    wrong = rf'unexpected tensors \(1; config.json decides which tensors exist\): {name}'
    with on_mesh(config), pytest.raises(ConfigError, match=wrong):
        from_huggingface(config, tensors, source='mistral')
