"""The configs of a seed: valid, the same everywhere, and of everything that the schema offers."""

import itertools
import subprocess
import sys
from collections import Counter
from typing import get_type_hints

import pytest

from megajax.analysis.fuzz.choices import NOT_DRAWN, choices
from megajax.analysis.fuzz.draw import LAYOUTS, MOST_DEVICES, described, draw
from megajax.analysis.inspect.one_device import on_one_device
from megajax.core.config import Config, ConfigError, MeshConfig
from megajax.core.config.conflicts import FEATURES
from megajax.core.config.keys import keys_in
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.relevance import has_choice

# The configs of this seed show each value early; if other values are drawn, another seed may.
SEED, COUNT = 8, 50
# Features that are not drawn, since they are of runs rather than of steps.
OTHERS = 'train.sample_prompts', 'data.order'


@pytest.fixture(scope='module', name='drawn')
def fixture_drawn() -> list[Config]:
    return [draw(SEED, LAYOUTS * model) for model in range(COUNT)]


def test_a_seed_and_a_number_give_one_config_and_other_seeds_give_others(drawn):
    assert [draw(SEED, LAYOUTS * model) for model in range(3)] == drawn[:3]
    assert len({*drawn, *(draw(1, LAYOUTS * model) for model in range(3))}) == COUNT + 3


def test_a_config_is_the_same_in_each_process(drawn):
    code = 'from megajax.analysis.fuzz.draw import described, draw'
    run = [sys.executable, '-c', f'{code}; print(described(draw({SEED}, 24)))']
    assert subprocess.check_output(run, text=True).strip() == described(drawn[3])


def test_configs_in_a_row_are_layouts_of_one_model_with_the_same_expected_results():
    numbers = range(2 * LAYOUTS)
    models = [
        [draw(0, number) for number in numbers if number // LAYOUTS == place] for place in (0, 1)
    ]
    for layouts in models:
        assert len({on_one_device(config, exact=False) for config in layouts}) == 1
        assert len({*layouts}) > LAYOUTS / 2
    assert on_one_device(models[0][0], exact=False) != on_one_device(models[1][0], exact=False)


def test_every_config_is_valid_and_of_several_but_few_devices(drawn):
    assert not any(incompatibilities(config) for config in drawn)
    assert {config.mesh.num_devices for config in drawn} <= {*range(2, MOST_DEVICES + 1)}


def test_each_feature_of_the_table_of_conflicts_is_drawn_and_left_out(drawn):
    for name, (has, _) in FEATURES.items():
        if not name.startswith(OTHERS):
            assert len({has(config) for config in drawn}) == 2, name


def test_each_value_of_an_enumeration_is_drawn(drawn):
    found = Counter(
        (f'{section}.{key}', value)
        for config in drawn
        for section in ('model', 'mesh', 'train', 'optim', 'data', 'vision')
        if getattr(config, section)
        for key, value in getattr(config, section).model_dump(exclude={'layers', 'experts'}).items()
        if isinstance(value, (bool, str))
    )
    of_vision = {('model.position', 'mrope'), ('model.position', 'rope_2d')}
    wanted = {
        (path, value)
        for path, values in choices().items()
        for value in values
        if path.count('.') == 1 and isinstance(value, (bool, str))
    }
    assert wanted - of_vision - {*found} == set()


def test_a_drawn_budget_has_a_choice_and_sequences_have_room_for_its_tokens(drawn):
    found = [config for config in drawn if config.relevance is not None]
    assert len({config.relevance.total_tokens for config in found}) > 1
    for config in found:
        assert has_choice(config.relevance)
        in_sequence = 0 if config.vision.is_crossed else config.vision.images
        assert in_sequence * config.relevance.total_tokens < config.train.seq_len


def test_a_fixed_length_of_sequences_is_kept_with_a_budget():
    budget = 'relevance.regions=[2, 1]', 'relevance.total_tokens=208'
    config = draw(0, 0, (*budget, 'train.seq_len=32'))
    assert config.train.seq_len == 32
    assert config.vision.is_crossed  # with images in the sequence, it would be too short


def test_each_axis_of_the_mesh_has_several_sizes(drawn):
    sizes = [key for key, kind in get_type_hints(MeshConfig).items() if kind is int]
    assert 'stages' in sizes
    for axis in sizes:
        assert len({getattr(config.mesh, axis) for config in drawn}) > 1, axis


def test_every_key_of_the_schema_is_drawn_or_left_out_by_name():
    """A new boolean or enumeration is drawn by itself; a new number needs its sizes."""
    drawn, known = {*choices()}, {key.path for key in keys_in()}
    in_groups = {key for key in known if key.startswith(('model.layers.', 'train.profile.'))}
    assert not known - in_groups - drawn - NOT_DRAWN
    assert not NOT_DRAWN & drawn
    assert NOT_DRAWN - {'model.max_seq_len'} <= known


def test_settings_that_are_fixed_are_in_every_config():
    fixed = (
        'mesh.stages=2',
        'train.dtype=float16',
        'model.experts={count: 4, active: 2, ffn_size: 64}',
    )
    for number in range(10):
        config = draw(0, number, fixed)
        assert (config.mesh.stages, config.train.dtype) == (2, 'float16')
        assert config.model.experts is not None
        assert config.model.experts.count == 4


def test_a_section_that_is_fixed_to_null_is_in_no_config(drawn):
    assert any(config.lora is not None for config in drawn[:10])
    fixed = [draw(SEED, LAYOUTS * model, ['lora=null']) for model in range(10)]
    assert all(config.lora is None for config in fixed)


def test_fixed_settings_that_conflict_are_rejected_with_the_rules_of_the_config(monkeypatch):
    monkeypatch.setattr('megajax.analysis.fuzz.draw.RESTARTS', 1)
    with pytest.raises(ConfigError, match='2-D tensor parallelism does not support experts'):
        draw(0, 0, ('model.experts={count: 4, active: 2, ffn_size: 64}', 'mesh.model_rows=2'))
    with pytest.raises(ConfigError, match=r'mesh\.stagse'):
        draw(0, 0, ('mesh.stagse=2',))


def test_pairs_of_parallelism_are_drawn_together(drawn):
    """A fault is often one of two features, each of which is right by itself."""
    kinds = 'stages', 'context', 'model', 'data'
    have = [{kind for kind in kinds if getattr(config.mesh, kind) > 1} for config in drawn]
    for pair in itertools.combinations(kinds, 2):
        assert any({*pair} <= each for each in have), pair
