"""An override changes a recorded config as it changes the config that the run was started with."""

import re
import shutil
from pathlib import Path

import pytest

from megajax.core.config import Config, dump, load, reload
from megajax.core.config.recorded import OF_START
from megajax.core.config.schema import SECTIONS, RunConfig

BASE = (
    'model: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 1000, max_seq_len: 1024}\n'
    'data: {tokenizer: none}\n'
)
YARN = '{type: yarn, factor: 4.0, original_max_seq_len: 16}'
ROPE = ('model.position=rope', f'model.rope_scaling={YARN}')
LINEAR = ('model.position=rope', 'model.rope_scaling={type: linear, factor: 4.0}')
TO_YARN = ('model.rope_scaling.type=yarn', 'model.rope_scaling.original_max_seq_len=16')
# overrides of a new run, overrides of the recorded run, and keys that follow from the second
CASES: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    ((), ('model.num_heads=8',), ('num_kv_heads', 'head_dim', 'query_scale')),
    ((), ('model.hidden_size=128',), ('head_dim', 'ffn_size', 'query_scale')),
    ((), ('model.head_dim=32',), ('query_scale',)),
    ((), ('model.objective=masked_lm', 'train.sample_prompts=[]'), ('attention',)),
    ((), ('model.bias=false',), ('qkv_bias',)),
    ((), ('model.dropout=0.1',), ('attention_dropout',)),
    (ROPE, ('model.rope_scaling.factor=8',), ('rope_scaling',)),
    (LINEAR, TO_YARN, ('rope_scaling',)),
    (ROPE, ('model.rope_scaling=null', 'model.num_heads=2'), ('rope_scaling', 'head_dim')),
]


@pytest.fixture(name='base')
def write_base(tmp_path: Path) -> Path:
    (tmp_path / 'base.yaml').write_text(BASE)
    return tmp_path / 'base.yaml'


def record(config: Config, folder: Path) -> Path:
    """Write the config of a run with a checkpoint as the run does."""
    (folder / 'run/checkpoints/3').mkdir(parents=True)
    (folder / 'run/checkpoints/3/record.json').touch()
    (folder / 'run/config.yaml').write_text(dump(config))
    return folder / 'run/config.yaml'


@pytest.mark.parametrize(('first', 'later', 'keys'), CASES)
def test_recorded_defaults_follow_from_overridden_keys(
    base: Path,
    tmp_path: Path,
    first: tuple[str, ...],
    later: tuple[str, ...],
    keys: tuple[str, ...],
) -> None:
    begun, meant = load(base, first), load(base, (*first, *later))
    assert all(getattr(begun.model, key) != getattr(meant.model, key) for key in keys)
    assert reload(begun.model_dump(mode='json'), later, place='record.json') == meant
    assert load(record(begun, tmp_path), later) == meant


def test_each_default_with_a_formula_has_a_case() -> None:
    formulas = {
        name
        for name, field in SECTIONS['model'].model_fields.items()
        if field.default_factory is not None
    }
    assert formulas == {key for _, _, keys in CASES for key in keys} - {'rope_scaling'}


def test_the_mlps_of_a_recorded_vision_encoder_follow_its_width() -> None:
    stored = load('tiny_vlm').model_dump(mode='json')
    width = stored['vision']['hidden_size']
    stored['vision']['ffn_size'] = 4 * width
    vision = reload(stored, [f'vision.hidden_size={2 * width}'], place='record.json').vision
    assert vision is not None
    assert vision.ffn_size == 8 * width


@pytest.mark.parametrize(
    ('own', 'later'),
    [
        ('model.query_scale=0.3', 'model.head_dim=32'),
        ('model.ffn_size=200', 'model.hidden_size=128'),
        ('model.num_kv_heads=2', 'model.num_heads=8'),
        ('model.attention_dropout=0.2', 'model.dropout=0.1'),
        ('model.rope_scaling.attention_factor=1.5', 'model.rope_scaling.factor=8'),
        ('model.head_dim=24', 'model.hidden_size=128'),
    ],
)
def test_a_users_own_value_stays(base: Path, own: str, later: str) -> None:
    begun = load(base, [*ROPE, own])
    again = reload(begun.model_dump(mode='json'), [later], place='record.json')
    assert again == load(base, [*ROPE, own, later])


def test_without_an_override_of_its_sources_every_recorded_key_stays(
    base: Path, tmp_path: Path
) -> None:
    """A head dim that is rounded down equals its formula, and is only valid if it is given."""
    begun = load(base, ['model.hidden_size=66', 'model.head_dim=16'])
    run = record(begun, tmp_path)
    assert dump(load(run)) == dump(begun)
    assert load(run, ['optim.lr=2e-3']).model == begun.model


def test_a_copied_config_does_not_name_the_run_that_it_is_a_copy_of(
    base: Path, tmp_path: Path
) -> None:
    """Earlier versions wrote these keys."""
    own = f'run.dir={tmp_path}/run'
    run = record(load(base, [own, 'run.resume=never', 'run.max_minutes=5']), tmp_path)
    assert load(run) == load(base, [own, 'run.max_minutes=5'])
    shutil.copytree(run.parent, tmp_path / 'copy')
    assert load(tmp_path / 'copy/config.yaml') == load(base, ['run.max_minutes=5'])


def test_the_documentation_of_run_names_the_keys_that_its_config_does_not_keep() -> None:
    about = (RunConfig.__doc__ or '').partition(': the `config.yaml`')[0].partition('\n\n')[2]
    assert {*re.findall(r'`(\w+)`', about)} == {*OF_START}


@pytest.mark.parametrize(
    ('first', 'later'),
    [
        ('data.corpus=mine', 'data.blend={web: 0.7, code: 0.3}'),
        ('data.blend={web: 0.7, code: 0.3}', 'data.corpus=mine'),
        ('data.blend={web: 0.7, code: 0.3}', 'data.corpus=stdlib'),
    ],
)
def test_a_new_corpus_or_blend_replaces_the_recorded_one(
    base: Path, tmp_path: Path, first: str, later: str
) -> None:
    begun = load(base, [first])
    assert reload(begun.model_dump(mode='json'), [later], place='record.json') == load(
        base, [later]
    )
    assert load(record(begun, tmp_path), [later]) == load(base, [later])


def test_a_blend_that_is_overridden_to_be_empty_leaves_the_recorded_corpus(base: Path) -> None:
    stored = load(base, ['data.corpus=mine']).model_dump(mode='json')
    assert reload(stored, ['data.blend={}'], place='record.json').data.corpus == 'mine'


@pytest.mark.parametrize('beside', ['data', 'checkpoints/gpt2', 'checkpoints/100'])
def test_a_users_own_file_is_changed_only_where_an_override_says(
    base: Path, tmp_path: Path, beside: str
) -> None:
    """Other programs have a folder of checkpoints, too."""
    (tmp_path / beside).mkdir(parents=True)
    own = tmp_path / 'config.yaml'
    own.write_text(dump(load(base, [f'run.dir={tmp_path}/mine', 'run.resume=must'])))
    config = load(own, ['model.head_dim=32'])
    assert config.model.query_scale == 16**-0.5
    assert (config.run.dir, config.run.resume) == (f'{tmp_path}/mine', 'must')


@pytest.mark.parametrize('evidence', ['lock', 'checkpoints/0/record.json'])
def test_a_config_is_recorded_if_a_run_has_written_to_its_folder(
    base: Path, tmp_path: Path, evidence: str
) -> None:
    path = tmp_path / evidence
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    (tmp_path / 'config.yaml').write_text(dump(load(base, ['run.resume=must'])))
    assert load(tmp_path / 'config.yaml') == load(base)
