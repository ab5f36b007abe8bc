"""The rotary settings of a config.json, as transformers reads them."""

import json
import math
from typing import Any

import pytest
from interop.stored import DATA

from megajax.core.config import ConfigError, ModelConfig, RopeScaling
from megajax.interop.huggingface.families import read_family, write_family
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_parameters, read_rope, write_parameters

THETA = {'rope_theta': 5e5}
YARN = THETA | {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 8}


def read(keys: dict[str, Any], **settings: Any) -> tuple[Keys, list[str]]:
    reader = Reader({'rope_theta': 1e4} | keys, 'config.json')
    return read_rope(reader, **settings), reader.problems


@pytest.mark.parametrize(
    'own',
    [
        {},
        {'attention_factor': None, 'beta_fast': None, 'beta_slow': None},
        {'attention_factor': 1.5, 'beta_fast': 16.0, 'beta_slow': 2.0, 'truncate': False},
    ],
)
def test_yarn_is_read_with_the_defaults_of_transformers_and_written(own: dict[str, Any]) -> None:
    keys = json.loads((DATA / 'llama2' / 'config.json').read_text())
    model = ModelConfig(**read_family(keys | {'rope_parameters': YARN | own}, '')[1])
    assert write_parameters(model) == {
        **YARN,
        'attention_factor': 0.1 * math.log(4) + 1.0,
        'beta_fast': 32.0,
        'beta_slow': 1.0,
        'truncate': True,
        **{name: value for name, value in own.items() if value is not None},
    }
    written = write_family(model)[1]
    assert ModelConfig(**read_family(written, '')[1]).rope_scaling == model.rope_scaling


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (
            {'rope_theta': 1e4, 'rope_type': 'yarn', 'factor': 4.0},
            'original_max_position_embeddings: required by rope_type yarn, and missing',
        ),
        (YARN | {'mscale': 0.707}, 'mscale: 0.707: is not supported'),
        (YARN | {'mscale_all_dim': 1}, 'mscale_all_dim: 1: is not supported'),
        (YARN | {'truncate': None}, 'truncate: must be true or false, not null'),
        (YARN | {'factor': None}, 'factor: must be a valid number, not null'),
        (YARN | {'rope_type': ['yarn']}, 'rope_type: ["yarn"]: only "default", "linear", "llama3"'),
        (YARN | {'rope_type': 'longrope'}, 'short_factor: required by rope_type longrope'),
        (THETA | {'rope_type': 'llama3', 'beta_fast': 2}, 'beta_fast: 2: is not supported'),
        (THETA | {'partial_rotary_factor': 0.5}, 'partial_rotary_factor: 0.5: only 1'),
    ],
)
def test_a_setting_that_is_not_supported_is_named(given: dict[str, Any], message: str) -> None:
    problems = read({'rope_parameters': given})[1]
    assert f'config.json: rope_parameters.{message}' in '\n'.join(problems)


def test_rope_scaling_is_read_where_there_is_also_rope_parameters() -> None:
    linear = {'rope_type': 'linear', 'factor': 2.0}
    found, problems = read({'rope_scaling': linear, 'rope_parameters': THETA})
    assert found == {'rope_theta': 1e4, 'rope_scaling': {'type': 'linear', 'factor': 2}}
    assert not problems


def test_the_fraction_of_a_family_is_its_default_and_a_config_may_have_another() -> None:
    top, inner = {'partial_rotary_factor': 0.25}, {'partial_rotary_factor': 0.75}
    for keys, fraction in (
        ({}, 0.5),
        (top, 0.25),
        (top | {'rope_parameters': THETA | inner}, 0.75),
    ):
        found, problems = read(keys, fraction=0.5)
        assert (found['rotary_fraction'], problems) == (fraction, [])
    _, (problem,) = read({'partial_rotary_factor': 2}, fraction=0.5)
    assert 'partial_rotary_factor: must be less than or equal to 1, not 2' in problem


def test_truncate_of_one_type_of_layers_is_refused_because_transformers_ignores_it() -> None:
    reader, key = Reader({}, 'config.json'), 'rope_parameters.full_attention'
    keys = read_parameters(reader, key, YARN | {'truncate': False}, 1e4, per_layer=True)
    why = 'false: only true is supported for each layer'
    assert reader.problems == [f'config.json: {key}.truncate: {why}']
    assert keys['rope_theta'] == 5e5


LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LENGTH = 'original_max_position_embeddings'


@pytest.mark.parametrize('given', [YARN, THETA | LLAMA3 | {LENGTH: 8}])
def test_a_length_outside_the_settings_is_refused_where_it_differs(given: dict[str, Any]) -> None:
    # A rope of transformers 5 has the length outside, one of earlier versions the length inside.
    _, (problem,) = read({'rope_parameters': given, LENGTH: 16})
    assert f'{LENGTH}: 16: differs from rope_parameters.{LENGTH}=8: put the right one' in problem
    assert read({'rope_parameters': given, LENGTH: 8}) == read({'rope_parameters': given})
    linear = {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}  # has no length
    assert read(linear | {LENGTH: 16}) == read(linear)


FACTORS = {'short_factor': [1.0, 1.5], 'long_factor': [2.0, 4.0]}


@pytest.mark.parametrize('kind', ['longrope', 'su', 'yarn'])
def test_phi_names_longrope_in_three_ways_and_its_lengths_at_the_top(kind: str) -> None:
    keys = json.loads((DATA / 'phi3' / 'config.json').read_text())
    keys |= {'max_position_embeddings': 128, 'original_max_position_embeddings': 32}
    given = {'type': kind, 'partial_rotary_factor': 1.0, 'rope_theta': 1e4, **FACTORS}
    model = ModelConfig(**read_family(keys | {'rope_parameters': given}, '')[1])
    expected = RopeScaling(type='longrope', factor=4.0, original_max_seq_len=32, **FACTORS)
    assert model.rope_scaling == expected
    assert expected.attention_factor == math.sqrt(1 + math.log(4) / math.log(32))
    written = write_family(model, 'phi3')[1]
    assert written['original_max_position_embeddings'] == 32
    assert ModelConfig(**read_family(written, '')[1]) == model


@pytest.mark.parametrize('own', [{}, {'attention_factor': 1.5}])
def test_vllm_reads_the_attention_factor_of_a_shortened_phi(own: dict[str, float]) -> None:
    keys = json.loads((DATA / 'phi3' / 'config.json').read_text())
    keys |= {'max_position_embeddings': 128, 'original_max_position_embeddings': 32}
    given = {'rope_type': 'longrope', 'rope_theta': 1e4, **FACTORS, **own}
    model = read_family(keys | {'rope_parameters': given}, '')[1] | {'max_seq_len': 32}
    written = write_family(ModelConfig(**model), 'phi3')[1]
    assert written['max_position_embeddings'] == 32
    scaling = written['rope_scaling']
    # Without these keys, vLLM computes the factor from the two lengths, which are equal.
    expected = own.get('attention_factor', math.sqrt(1 + math.log(4) / math.log(32)))
    assert scaling['short_mscale'] == scaling['long_mscale'] == expected
    with pytest.raises(ConfigError, match=r'long_mscale: 2.0: only the value of attention_factor'):
        read_family(written | {'rope_scaling': scaling | {'long_mscale': 2.0}}, '')


def test_a_scaling_that_phi_does_not_have_is_named() -> None:
    keys = json.loads((DATA / 'phi3' / 'config.json').read_text())
    with pytest.raises(ConfigError, match=r'rope_type: "llama3": only "default" and "longrope"'):
        read_family(keys | {'rope_parameters': {'rope_type': 'llama3', 'rope_theta': 1e4}}, '')
