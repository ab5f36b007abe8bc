"""Presets have the size that their paper or model card states."""

import csv
from pathlib import Path

import pytest

from megajax.core.config import ModelConfig, load, presets
from megajax.core.counts.parameters import num_parameters, parameters

CONFIGS = Path(__file__).parents[3] / 'configs'
TABLE_1 = (
    (CONFIGS.parent / 'megajax/analysis/plan/published/papers/narayanan_2021_table1.csv')
    .read_text()
    .splitlines()
)


@pytest.mark.parametrize(
    ('preset', 'parameters'),
    [
        ('gemma3_1b', 999_885_952),
        ('gemma3_27b', 27_009_346_304),
        ('gpt2_124m', 124_439_808),
        ('gpt2_345m', 354_823_168),
        ('llama3_8b', 8_030_261_248),
        ('llama3_70b', 70_553_706_496),
        ('olmo3_7b', 7_298_011_136),
        ('qwen3_8b', 8_190_735_360),
        ('qwen3_vl_2b', 2_127_532_032),
        ('qwen3_vl_4b', 4_437_815_808),
        ('qwen3_vl_8b', 8_767_123_696),
        ('qwen3_vl_32b', 33_357_390_064),
    ],
)
def test_released_checkpoints_have_exactly_this_size(preset: str, parameters: int) -> None:
    assert num_parameters(load(preset).model) == parameters


@pytest.mark.parametrize(
    ('preset', 'billions'),
    [
        ('megatron_1.2b', 1.21),
        ('megatron_2.5b', 2.49),
        ('megatron_4.2b', 4.20),
        ('megatron_8.3b', 8.31),
        ('gpt3_175b', 174.6),
    ],
)
def test_the_papers_models_have_about_this_size(preset: str, billions: float) -> None:
    assert num_parameters(load(preset).model) == pytest.approx(billions * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ('preset', 'size', 'unit'),
    [('bert_336m', '336', 1e6), ('bert_1.3b', '1.3', 1e9), ('bert_3.9b', '3.9', 1e9)],
)
def test_the_papers_berts_have_the_size_that_it_rounds(preset: str, size: str, unit: float) -> None:
    digits = len(size.partition('.')[2])
    assert f'{num_parameters(load(preset).model) / unit:.{digits}f}' == size


@pytest.mark.parametrize(
    'row',
    [*csv.DictReader(line for line in TABLE_1 if line[0] != '#')],
    ids=lambda row: row['params_b'],
)
def test_a_gpt_has_the_parameters_of_narayanan_et_al(row: dict[str, str]) -> None:
    """Their equation 2 and Table 1, of which the equation leaves out the last norm."""
    l, h, V, s = int(row['layers']), int(row['hidden']), 51200, 2048
    count = num_parameters(
        ModelConfig(
            num_layers=l, hidden_size=h, num_heads=int(row['heads']), vocab_size=V, max_seq_len=s
        )
    )
    assert (
        count - 2 * h == 12 * l * h**2 + 13 * l * h + (V + s) * h
    )  # 12 l h^2 (1 + 13/(12h) + (V+s)/(12 l h))
    assert f'{count / 1e9:.1f}' == row['params_b']


@pytest.mark.parametrize('preset', presets())
def test_each_preset_states_its_size(preset: str) -> None:
    assert (
        f'{num_parameters(load(preset).model):,} parameters'
        in (CONFIGS / f'{preset}.yaml').read_text()
    )


@pytest.mark.parametrize(
    ('preset', 'count', 'used'),  # as published, in billions; gpt-oss without the embedding table
    [
        ('qwen3_30b_a3b', 30_532_122_624, 3.3),
        ('qwen3_235b_a22b', 235_093_634_560, 22),
        ('mixtral_8x7b', 46_702_792_704, 13),
        ('gpt_oss_20b', 20_914_757_184, 3.6),
    ],
)
def test_a_mixture_has_its_published_size_and_states_what_a_token_uses(
    preset: str, count: int, used: float
) -> None:
    model = load(preset).model
    assert model.experts is not None
    total, active = num_parameters(model), num_parameters(model, active=True)
    assert total == count
    assert f'a token uses {active:,}' in (CONFIGS / f'{preset}.yaml').read_text()
    per_expert = 3 * model.hidden_size * model.experts.ffn_size
    if model.bias:
        per_expert += 2 * model.experts.ffn_size + model.hidden_size
    unused = model.experts.count - model.experts.active
    assert total - active == model.num_layers * unused * per_expert
    table = model.vocab_size * model.hidden_size if preset == 'gpt_oss_20b' else 0
    assert (active - table) / 1e9 == pytest.approx(used, rel=0.02)


def test_tiny_moe_uses_as_many_parameters_for_a_token_as_tiny_and_its_routers() -> None:
    dense, mixture = load('tiny').model, load('tiny_moe').model
    routers = mixture.num_layers * mixture.hidden_size * 8
    assert num_parameters(mixture, active=True) == num_parameters(dense) + routers
    assert num_parameters(dense, active=True) == num_parameters(dense)


@pytest.mark.parametrize(
    ('change', 'added'),
    [
        ({'tie_embeddings': False}, 1000 * 64),
        ({'position': 'rope'}, -128 * 64),
        ({'activation': 'swiglu'}, 2 * (64 * 256 + 256)),
        ({'activation': 'geglu'}, 2 * (64 * 256 + 256)),
        ({'num_kv_heads': 1}, -2 * 2 * 3 * 16 * (64 + 1)),
        ({'norm': 'rmsnorm'}, -5 * 64),
        ({'qk_norm': True}, 2 * 4 * 16),
        ({'qk_norm': True, 'norm': 'rmsnorm'}, 2 * 2 * 16 - 5 * 64),
        ({'qk_norm': 'all', 'norm': 'rmsnorm'}, 2 * 2 * 64 - 5 * 64),
        ({'norm_position': 'after'}, 0),
        ({'norm_position': 'both'}, 2 * 2 * 2 * 64),
        ({'bias': False}, -2 * (3 * 64 + 64 + 256 + 64)),
        (
            {'objective': 'masked_lm'},
            2 * 64 + (64 + 1 + 2) * 64 + 1000 + (64 + 1) * 64 + (64 + 1) * 2,
        ),
    ],
    ids=str,
)
def test_each_choice_adds_what_it_should(change: dict[str, object], added: int) -> None:
    base = {
        'num_layers': 2,
        'hidden_size': 64,
        'num_heads': 4,
        'vocab_size': 1000,
        'max_seq_len': 128,
    }
    assert (
        num_parameters(ModelConfig.model_validate(base | change))
        == num_parameters(ModelConfig.model_validate(base)) + added
    )


@pytest.mark.parametrize(('preset', 'tables'), [('gpt2_124m', 1), ('llama3_8b', 2)])
def test_padding_adds_rows_to_the_embedding_and_an_untied_head(preset: str, tables: int) -> None:
    model = load(preset).model
    rows = model.padded_vocab_size - model.vocab_size
    assert (
        num_parameters(model, padded=True) - num_parameters(model)
        == tables * rows * model.hidden_size
    )


@pytest.mark.parametrize('preset', ['tiny', 'tiny_bert', 'tiny_arr_coc', 'olmo2_7b'])
def test_each_matrix_of_a_product_says_the_dims_that_it_sums_and_those_of_its_result(
    preset: str,
) -> None:
    for name, x in parameters(load(preset).model):
        if (x.is_matrix or x.is_adapter) and not name.startswith('relevance.'):
            assert x.inputs, name
            assert x.outputs, name
            assert sorted(x.inputs + x.outputs) == sorted(x.dims_of_layer), name
            assert not set('LJⓁⒶ') & {*x.outputs} or name == 'cross.key_value.weight'
