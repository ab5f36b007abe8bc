"""What no run can be is refused with its limit, before anything is computed with it."""

from pathlib import Path

import numpy as np
import pytest

from megajax.base.errors import MAX_REASON_CHARACTERS, reason
from megajax.core.config import ConfigError, load, overridden
from megajax.core.config.keys import Key, keys_in

HUGE = 2**63 - 1


def message(override: str) -> str:
    with pytest.raises(ConfigError) as error:
        load('tiny', [override])
    return str(error.value)


@pytest.mark.parametrize('key', [key for key in keys_in() if key.type.startswith('integer')])
def test_every_integer_has_an_upper_limit(key: Key) -> None:
    assert '<' in key.type, f'{key.path} has no upper limit'


@pytest.mark.parametrize(
    ('key', 'limit'),
    [
        ('model.num_layers', '10000'),
        ('model.hidden_size', '16777216'),
        ('model.num_heads', '65536'),
        ('model.max_seq_len', '2147483647'),
        ('mesh.model', '1048576'),
        ('train.steps', '2147483647'),
    ],
)
@pytest.mark.parametrize('value', [HUGE, 10**20])
def test_the_limit_is_named(key: str, limit: str, value: int) -> None:
    expected = f'{key}: must be less than or equal to {limit}, not {value}'
    assert expected in message(f'{key}={value}')


def test_two_seeds_never_give_the_same_numbers() -> None:
    # jax draws from the lower 32 bits of a seed.
    assert 'train.seed: must be less than 4294967296' in message('train.seed=4294967296')


@pytest.mark.parametrize('split', ['1e308,1e308,1e308', 'nan,1,1', 'inf,0,0', '1,-1,0', '1,1'])
def test_a_split_has_a_finite_sum(split: str) -> None:
    assert f"data.split: '{split}' is not three finite numbers" in message(f'data.split={split}')


@pytest.mark.parametrize(
    'key',
    [
        *('run.dir', 'run.start_from', 'run.compile_cache', 'run.data_cache', 'run.wandb'),
        *('data.corpus', 'data.tokenizer', 'data.chat_template'),
    ],
)
def test_a_path_is_one_that_a_file_can_have(key: str) -> None:
    assert f"{key}: must be text without the character NUL, not 'a\\x00b'" in message(
        f'{key}="a\\0b"'
    )
    assert f"{key}: must be a name of at least one character, not ''" in message(f"{key}=''")
    assert f'{key}: must be at most 4,095 characters' in message(f'{key}={"x" * 256}')
    assert f'{key}: must be at most 4,095 characters' in message(f'{key}={"x/" * 2048}')


FOLDERS = 'run.dir', 'run.start_from', 'run.compile_cache', 'run.data_cache'


@pytest.mark.parametrize('key', FOLDERS)
def test_a_folder_of_a_run_is_no_url(key: str) -> None:
    for url in 'gs://bucket/run', 'S3://bucket', 'file:///scratch/run':
        assert (
            f'{key}: must be a folder on this machine or on a shared file system and no URL, not '
            f"'{url}'" in message(f'{key}={url}')
        )


@pytest.mark.parametrize('key', FOLDERS)
def test_a_folder_of_a_run_may_be_in_the_home_directory(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    values = '~/runs/x', 'a~/~', 'auto'
    found = [overridden(['run.dir=other', f'{key}={value}'], key) for value in values]
    assert found == [f'{tmp_path}/runs/x', 'a~/~', 'auto']
    run = load('tiny', [f'{key}=~/runs/x']).run
    assert getattr(run, key.removeprefix('run.')) == f'{tmp_path}/runs/x'


def test_an_override_that_is_no_value_of_its_key_is_none() -> None:
    assert overridden(['run.dir=3'], 'run.dir') is None
    assert overridden(['run.dir=a', 'run.dir=gs://bucket/run'], 'run.dir') is None
    assert overridden(['train.steps=3'], 'train.steps') == 3


def test_no_path_of_a_blend_has_nul() -> None:
    assert 'must be text without the character NUL' in message('data.blend={"a\\0b": 1}')
    assert 'must be a name of at least one character' in message('data.blend={"": 1}')


def test_no_weight_of_a_blend_is_vanishingly_small() -> None:
    limit = 'data.blend: must be weights of which the largest is at most 1,000,000,000,000 times th'
    assert limit in message('data.blend={a: 1.0e-320, b: 1.0e+300}')
    assert limit in message('data.blend={a: 0.9, b: 1.0e+12}')
    assert load('tiny', ['data.blend={a: 1, b: 1.0e+12}']).data.blend == {'a': 1, 'b': 1e12}


@pytest.mark.parametrize('key', ['run.max_minutes', 'checkpoint.minutes', 'run.watchdog_seconds'])
def test_a_time_is_one_that_a_thread_can_wait(key: str) -> None:
    assert f'{key}: must be ' in message(f'{key}=1e300')


@pytest.mark.parametrize(
    ('key', 'value', 'limit', 'least'),
    [
        ('optim.eps', '1e-50', 'greater than or equal to 1.2e-38', '1.2e-38'),
        ('optim.grad_clip', '1e-50', 'greater than or equal to 1.2e-38', '1.2e-38'),
        ('model.norm_eps', '1e-50', 'greater than or equal to 1.2e-38', '1.2e-38'),
        ('model.rope_theta', '1e-50', 'greater than or equal to 1e-14', '1e-14'),
        ('optim.beta1', '0.99999999', 'less than or equal to 0.9999999', '0.9999999'),
        ('optim.beta2', '0.99999999', 'less than or equal to 0.9999999', '0.9999999'),
        ('optim.momentum', '0.99999999', 'less than or equal to 0.9999999', '0.9999999'),
    ],
)
def test_no_divisor_is_0_in_fp32(key: str, value: str, limit: str, least: str) -> None:
    assert f'{key}: must be {limit}, not {float(value)}' in message(f'{key}={value}')
    section, _, name = key.partition('.')
    config = load('tiny', ['model.position=rope', 'optim.kind=muon', f'{key}={least}'])
    divisor = np.float32(getattr(getattr(config, section), name))
    assert divisor >= np.finfo(np.float32).tiny
    assert limit.startswith('greater') or np.float32(1) - divisor > 0


def test_the_factors_of_rotary_frequencies_are_not_0_in_fp32() -> None:
    limit = 'must be greater than or equal to 1e-14, not 1e-50'
    scaling = '{type: linear, factor: 1e-50}'
    assert f'model.rope_scaling: factor {limit}' in message(f'model.rope_scaling={scaling}')
    layers = '[{rope_theta: 1e-50}]'
    assert f'model.layers: [0].rope_theta {limit}' in message(f'model.layers={layers}')


def test_a_prompt_is_not_the_key_of_the_step_in_a_line_of_samples() -> None:
    said = message("train.sample_prompts=['a', 'step']")
    assert "train.sample_prompts: [1] must be text other than 'step', the key of " in said
    prompts = load('tiny', ["train.sample_prompts=['step ', 'Step', '']"]).train.sample_prompts
    assert prompts == ('step ', 'Step', '')


def test_a_path_may_be_long(tmp_path: Path) -> None:
    folder = '/'.join([str(tmp_path), *['é' * 127] * 10])
    assert load('tiny', [f'run.dir={folder}']).run.dir == folder


def test_the_reason_of_a_long_error_is_kept_at_its_end() -> None:
    why = 'No space left on device'
    shown = reason(OSError(f'cannot write {"a/" * 1000}: {why}\nand a page of places'))
    assert shown.startswith('cannot write a/')
    assert shown.endswith(why)
    assert len(shown) <= MAX_REASON_CHARACTERS


@pytest.mark.parametrize(
    ('override', 'said'),
    [
        ('model.qk_norm=yes', "model.qk_norm: must be true, false or 'all', not 'yes'"),
        ('model.qk_norm=1', "model.qk_norm: must be true, false or 'all', not 1"),
        ('train.unroll=on', "train.unroll: must be true, false or 'auto', not 'on'"),
        ('train.unroll=[auto]', "train.unroll: must be true, false or 'auto', not ['auto']"),
    ],
)
def test_a_value_of_two_types_has_one_message(override: str, said: str) -> None:
    assert message(override) == f'override {override}: {said}'


@pytest.mark.parametrize(
    ('override', 'said'),
    [
        ('lora.targets=[]', 'must be a list of at least 1 value, not []'),
        ('model.mrope_section=[1,2,3,4]', 'must be a list of at most 3 values, not [1, 2, 3, 4]'),
        ('model.mrope_section=[1,2]', '[2] missing from the list; add it'),
        ('data.blend=[1]', 'must be a group of keys, not [1]'),
        ('model.layers=[{"experts":{"count":4}}]', "[0].experts must be null, not {'count': 4}"),
    ],
)
def test_a_list_of_a_wrong_length_and_what_must_be_null_are_said(override: str, said: str) -> None:
    assert f'{override.partition("=")[0]}: {said}' in message(override).splitlines()[-1]
