"""Presets have the size that their paper or model card states."""

from pathlib import Path

import pytest

from megajax.config import ModelConfig, load, num_parameters, presets

CONFIGS = Path(__file__).parents[2] / 'configs'


@pytest.mark.parametrize(
    ('preset', 'parameters'),
    [
        ('gpt2_124m', 124_439_808),
        ('gpt2_345m', 354_823_168),
        ('llama3_8b', 8_030_261_248),
        ('llama3_70b', 70_553_706_496),
        ('qwen3_8b', 8_190_735_360),
    ],
)
def test_released_checkpoints_have_exactly_this_size(preset: str, parameters: int) -> None:
    assert num_parameters(load(preset).model) == parameters


@pytest.mark.parametrize(
    ('preset', 'billions'),
    [('megatron_1.2b', 1.21), ('megatron_2.5b', 2.49), ('megatron_4.2b', 4.20), ('megatron_8.3b', 8.31), ('gpt3_175b', 174.6)],
)
def test_the_papers_models_have_about_this_size(preset: str, billions: float) -> None:
    assert num_parameters(load(preset).model) == pytest.approx(billions * 1e9, rel=0.005)


@pytest.mark.parametrize('preset', presets())
def test_each_preset_states_its_size(preset: str) -> None:
    assert f'{num_parameters(load(preset).model):,} parameters' in (CONFIGS / f'{preset}.yaml').read_text()


@pytest.mark.parametrize(
    ('change', 'added'),
    [
        ({'tie_embeddings': False}, 1000 * 64),
        ({'position': 'rope'}, -128 * 64),
        ({'activation': 'swiglu'}, 2 * (64 * 256 + 256)),
        ({'num_kv_heads': 1}, -2 * 2 * 3 * 16 * (64 + 1)),
        ({'norm': 'rmsnorm'}, -5 * 64),
        ({'qk_norm': True}, 2 * 4 * 16),
        ({'qk_norm': True, 'norm': 'rmsnorm'}, 2 * 2 * 16 - 5 * 64),
        ({'bias': False}, -2 * (3 * 64 + 64 + 256 + 64)),
    ],
    ids=str,
)
def test_each_choice_adds_what_it_should(change: dict[str, object], added: int) -> None:
    base = {'num_layers': 2, 'hidden_size': 64, 'num_heads': 4, 'vocab_size': 1000, 'max_seq_len': 128}
    assert num_parameters(ModelConfig.model_validate(base | change)) == num_parameters(ModelConfig.model_validate(base)) + added


@pytest.mark.parametrize(('preset', 'tables'), [('gpt2_124m', 1), ('llama3_8b', 2)])
def test_padding_adds_rows_to_the_embedding_and_an_untied_head(preset: str, tables: int) -> None:
    model = load(preset).model
    rows = model.padded_vocab_size - model.vocab_size
    assert num_parameters(model, padded=True) - num_parameters(model) == tables * rows * model.hidden_size
