"""A family of Hugging Face's is named by the command and from Python alike."""

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from interop.stored import DATA

from megajax.commands.interop import Family
from megajax.core.config import ConfigError, LayerConfig, ModelConfig, RopeScaling, load
from megajax.core.config.experts import ExpertsConfig
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.interop.huggingface.families import ARCHITECTURES, FAMILIES, read_family, write_family
from megajax.interop.huggingface.family import HEAD
from megajax.interop.huggingface.weights import full_names, huggingface_pieces


def test_the_command_knows_every_family() -> None:
    assert set(typing.get_args(Family)) == set(ARCHITECTURES)


@pytest.mark.parametrize('name', sorted(ARCHITECTURES.keys() - {'megatron-bert'}))
def test_a_folder_may_omit_the_prefix_of_the_base_model(name: str) -> None:
    family = FAMILIES[name]
    names = {there.name for group in family.tensors.values() for there in group}
    saved = {name.removeprefix(family.prefix): name for name in names}
    assert names & saved.keys() == {HEAD}
    assert full_names(family, saved) == saved


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match='family gemma: choose among gpt2, llama, '):
        write_family(load('gpt2_124m').model, 'gemma')


LIKE_LLAMA = {
    'hidden_size': 64,
    'intermediate_size': 96,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'vocab_size': 50,
    'max_position_embeddings': 32,
}
STORED = {'gpt2': DATA / 'gpt2', 'qwen3_vl': Path(__file__).parent / 'qwen3_vl'}
YARN = RopeScaling(type='yarn', factor=4.0, original_max_seq_len=8)
EXPERTS = ExpertsConfig(count=4, active=2, ffn_size=24)
CHANGES: dict[str, dict[str, Any]] = {
    'window': {'window': 8},
    'no window': {'window': None, 'layers': ()},
    'windows in some layers': {'layers': (LayerConfig(window=8), LayerConfig(window=None))},
    'two windows': {'layers': (LayerConfig(window=8), LayerConfig(window=4))},
    'two thetas': {'layers': (LayerConfig(rope_theta=1e3), LayerConfig(rope_theta=1e5))},
    'layers without positions': {'layers': (LayerConfig(), LayerConfig(position='none'))},
    'no positions': {'position': 'none', 'layers': ()},
    'yarn': {'rope_scaling': YARN},
    'yarn in some layers': {'layers': (LayerConfig(rope_scaling=YARN), LayerConfig())},
    'half of a head': {'rotary_fraction': 0.5},
    'zero-centered norms': {'zero_centered_norm': True},
    'scaled embeddings': {'embedding_scale': 64.0},
    'scaled scores': {'query_scale': 0.5},
    'sinks': {'attention_sinks': True},
    'experts': {'experts': EXPERTS},
    'experts that are not normalized': {'experts': EXPERTS.model_copy(update={'normalize': False})},
    'experts with a sigmoid': {'experts': EXPERTS.model_copy(update={'scores': 'sigmoid'})},
    'no experts': {'experts': None},
}


def model_of(family: str) -> ModelConfig:
    keys = LIKE_LLAMA
    if family in STORED:
        keys = json.loads((STORED[family] / 'config.json').read_text())
    return ModelConfig(**read_family({**keys, 'model_type': family}, 'config.json')[1])


def settings_of(model: ModelConfig, names: set[str]) -> list[dict[str, Any]]:
    """Return what each layer computes with; a theta has no effect without positions."""
    layers = model.layer_configs
    of_rope = {'rope_theta', 'rope_scaling'}
    return [
        {name: getattr(layer, name) for name in names - (set() if layer.rotates else of_rope)}
        for layer in layers
    ]


def keys_or_problem(model: ModelConfig, family: str) -> tuple[dict[str, Any], str]:
    try:
        return write_family(model, family)[1], ''
    except ConfigError as error:
        return {}, str(error)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_setting_is_written_or_is_rejected_by_name(family: str) -> None:
    own, written = model_of(family), 0
    names = {*LayerConfig.model_fields, *(name for keys in CHANGES.values() for name in keys)}
    names -= {'repeat', 'layers'}
    for changed in CHANGES.values():
        model = own.model_copy(update=changed)
        expected = settings_of(model, names)
        different = {
            name
            for ours, theirs in zip(expected, settings_of(own, names), strict=True)
            for name in ours.keys() & theirs.keys()
            if ours[name] != theirs[name]
        }
        keys, problem = keys_or_problem(model, family)
        if problem:
            assert different & {*re.findall(r'[a-z_]+', problem)}, (changed, problem)
        else:
            back = ModelConfig(**read_family(keys, 'config.json')[1])
            assert settings_of(back, names) == expected, changed
            written += 1
    assert written or family in ('gpt2', 'megatron-bert', 'qwen3_vl')


@pytest.mark.parametrize('family', ['mixtral', 'qwen3_moe', 'olmoe', 'gpt_oss'])
def test_what_only_training_reads_of_experts_is_no_obstacle_to_an_export(family: str) -> None:
    model = model_of(family)
    assert model.experts is not None
    training = {'balance_loss': 0.01, 'z_loss': 1e-3, 'capacity': 1.25}
    experts = model.experts.model_copy(update=training)
    trained = model.model_copy(update={'experts': experts})
    assert write_family(trained, family) == write_family(model, family)
    biased = experts.model_copy(update={'selection_bias': True})
    with pytest.raises(ConfigError, match=r'does not support model\.experts\.selection_bias=True'):
        write_family(model.model_copy(update={'experts': biased}), family)


def test_a_gpt_oss_without_rope_parameters_has_yarn_as_in_transformers() -> None:
    scaling = model_of('gpt_oss').rope_scaling
    assert scaling is not None
    assert (scaling.type, scaling.factor, scaling.original_max_seq_len) == ('yarn', 32.0, 4096)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, False)
    assert model_of('gpt_oss').rope_theta == 150000.0


def test_a_bert_is_written_as_megatron_bert() -> None:
    family, keys = write_family(load('bert_336m').model, 'megatron-bert')
    assert (family, keys['model_type']) == ('megatron-bert', 'megatron-bert')


def test_a_family_of_other_names_has_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load('tiny').model
    renamed = {
        path: [row._replace(name=f'other.{row.name}') for row in rows]
        for path, rows in FAMILIES['gpt2'].tensors.items()
    }
    other = dataclasses.replace(FAMILIES['gpt2'], name='other', tensors=renamed)
    monkeypatch.setitem(FAMILIES, 'other', other)
    sizes = dim_sizes(model)
    shapes = {name: shape_of(one.dims, sizes) for name, one in parameters(model)}
    pieces, known = (huggingface_pieces(model, shapes, family=name) for name in ('other', 'gpt2'))
    for path, group in known.items():
        assert [piece._replace(name=f'other.{piece.name}') for piece in group] == pieces[path]


COMMON = {'hidden_act': 'silu', 'attention_dropout': 0.0, 'initializer_range': 0.02}
COMMON |= {'output_router_logits': False, 'sliding_window': None, 'tie_word_embeddings': False}
QWEN3 = COMMON | {'model_type': 'qwen3_moe', 'attention_bias': False, 'vocab_size': 151936}
QWEN3 |= {'head_dim': 128, 'num_key_value_heads': 4, 'max_position_embeddings': 40960}
QWEN3 |= {'rope_scaling': None, 'rope_theta': 1000000.0, 'rms_norm_eps': 1e-06}
QWEN3 |= {'num_experts': 128, 'num_experts_per_tok': 8, 'norm_topk_prob': True}
QWEN3 |= {'decoder_sparse_step': 1, 'mlp_only_layers': [], 'router_aux_loss_coef': 0.001}
QWEN3 |= {'use_sliding_window': False}
RELEASED: dict[str, dict[str, Any]] = {
    'qwen3_30b_a3b': QWEN3
    | {'num_hidden_layers': 48, 'max_window_layers': 48, 'hidden_size': 2048}
    | {'intermediate_size': 6144, 'moe_intermediate_size': 768, 'num_attention_heads': 32},
    'qwen3_235b_a22b': QWEN3
    | {'num_hidden_layers': 94, 'max_window_layers': 94, 'hidden_size': 4096}
    | {'intermediate_size': 12288, 'moe_intermediate_size': 1536, 'num_attention_heads': 64},
    'mixtral_8x7b': COMMON
    | {'model_type': 'mixtral', 'hidden_size': 4096, 'intermediate_size': 14336}
    | {'max_position_embeddings': 32768, 'num_attention_heads': 32, 'num_key_value_heads': 8}
    | {'num_hidden_layers': 32, 'num_local_experts': 8, 'num_experts_per_tok': 2}
    | {'rms_norm_eps': 1e-05, 'rope_theta': 1000000.0, 'vocab_size': 32000}
    | {'router_aux_loss_coef': 0.02},
    'gpt_oss_20b': COMMON
    | {'model_type': 'gpt_oss', 'attention_bias': True, 'experts_per_token': 4, 'head_dim': 64}
    | {'hidden_size': 2880, 'intermediate_size': 2880, 'initial_context_length': 4096}
    | {'layer_types': ['sliding_attention', 'full_attention'] * 12, 'sliding_window': 128}
    | {'max_position_embeddings': 131072, 'num_attention_heads': 64, 'num_key_value_heads': 8}
    | {'num_hidden_layers': 24, 'num_local_experts': 32, 'num_experts_per_tok': 4}
    | {'rms_norm_eps': 1e-05, 'rope_theta': 150000, 'swiglu_limit': 7.0, 'vocab_size': 201088}
    | {'quantization_config': {'quant_method': 'mxfp4'}, 'router_aux_loss_coef': 0.9}
    | {
        'rope_scaling': {
            **{'beta_fast': 32.0, 'beta_slow': 1.0, 'factor': 32.0, 'truncate': False},
            **{'original_max_position_embeddings': 4096, 'rope_type': 'yarn'},
        }
    },
}


@pytest.mark.parametrize('preset', RELEASED)
def test_a_preset_of_experts_is_the_released_model(preset: str) -> None:
    family, keys, _ = read_family(RELEASED[preset], 'config.json')
    model = load(preset).model
    assert model.experts is not None
    plain = model.experts.model_copy(update={'balance_loss': 0.0})
    released = ModelConfig(**keys)
    changed = {'experts': plain, 'ffn_size': released.ffn_size}
    assert released == model.model_copy(update=changed)
    assert write_family(model)[0] == family
