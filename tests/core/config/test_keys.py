"""The reference of config keys, which is read from the schema."""

import re
from typing import Any

import pytest

from megajax.core.config import ConfigError, load
from megajax.core.config.keys import formula_keys, keys_in
from megajax.core.config.layer import RopeScaling
from megajax.core.config.overrides import KEYS
from megajax.core.config.schema import SECTIONS
from megajax.core.config.section import Section

EVERY = {key.path: key for key in keys_in()}


def test_the_reference_has_every_key_that_a_config_may_set_in_its_order() -> None:
    assert [path for path in EVERY if path.count('.') == 1] == [*KEYS]


@pytest.mark.parametrize('path', EVERY)
def test_every_key_has_a_sentence(path: str) -> None:
    assert re.fullmatch(r'[A-Za-z].{8,}\.', EVERY[path].meaning)


@pytest.mark.parametrize(
    ('path', 'type', 'unit', 'default'),
    [
        ('model.hidden_size', 'integer > 0 and <= 16777216', 'elements', 'required'),
        ('model.dropout', 'number >= 0 and < 1', '', '0.0'),
        ('model.mrope_section', 'list of 3 integer > 0 and <= 2147483647', '', '[24, 20, 20]'),
        ('train.unroll', 'auto | true | false', '', 'auto'),
        ('train.profile', '{start, steps} | null', '', 'null'),
        ('train.profile.start', 'integer >= 0 and <= 2147483647', 'steps', 'required'),
        ('data.blend', '{text: number > 0}', '', '{}'),
        ('checkpoint.minutes', 'number > 0 and <= 10000000 | null', 'minutes', 'null'),
        ('run.watchdog_seconds', 'number | auto | null', 'seconds', 'auto'),
    ],
)
def test_a_type_a_unit_and_a_default_are_those_of_the_schema(
    path: str, type: str, unit: str, default: str
) -> None:
    key = EVERY[path]
    assert (key.type, key.unit, key.default) == (type, unit, default)


def sizes(**others: Any) -> dict[str, Any]:
    return {'num_layers': 2, 'hidden_size': 96, 'num_heads': 6, **others}


@pytest.mark.parametrize(
    ('section', 'values'),
    [
        ('vision', sizes()),
        ('model', sizes(vocab_size=99, max_seq_len=8, bias=False, dropout=0.25)),
        ('model', sizes(vocab_size=99, max_seq_len=8, objective='masked_lm')),
    ],
)
def test_the_formula_of_a_default_gives_the_default(section: str, values: dict[str, Any]) -> None:
    filled = SECTIONS[section].model_validate(values)
    fields = SECTIONS[section].model_fields
    computed = {name for name, field in fields.items() if field.default_factory}
    assert computed
    for name in computed:
        formula = EVERY[f'{section}.{name}'].default
        assert eval(formula, {}, dict(filled)) == getattr(filled, name)


def test_a_section_a_group_and_a_key_can_be_asked_for() -> None:
    assert [key.path for key in keys_in('loss')] == ['loss.label_smoothing', 'loss.z_loss']
    assert [key.path for key in keys_in('train.profile')][1:] == [
        'train.profile.start',
        'train.profile.steps',
    ]
    assert [key.path for key in keys_in('train.steps')] == ['train.steps']


@pytest.mark.parametrize(
    ('path', 'fix'),
    [
        ('optin', 'did you mean optim?'),
        ('train.step', 'did you mean train.steps?'),
        ('zzz', 'sections: model, vision, '),
    ],
)
def test_an_unknown_path_is_refused_with_the_nearest_one(path: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f'{path}: no such section or key; {fix}')):
        keys_in(path)


def test_a_group_is_set_as_the_page_says() -> None:
    profile = load('tiny', ['train.profile={start: 10, steps: 3}']).train.profile
    assert (profile.start, profile.steps) == (10, 3)


class Read(dict[str, Any]):
    """The values of a section, and the keys that were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.keys_read = set[str]()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)


ROPE: dict[str, Any] = {'factor': 4.0, 'original_max_seq_len': 16}


def test_the_formula_of_a_default_names_the_keys_that_it_is_computed_from() -> None:
    """An override of one of these keys changes a recorded default."""
    config = load('tiny_vlm')
    ropes = [RopeScaling(type=kind, **ROPE) for kind in ('linear', 'yarn', 'longrope')]
    read = dict[tuple[type[Section], str], set[str]]()
    for section in filter(None, (config.model, config.vision, *ropes)):
        for name, field in type(section).model_fields.items():
            compute: Any = field.default_factory
            if compute is not None:
                values = Read(section.__dict__)
                compute(values)
                read.setdefault((type(section), name), set()).update(values.keys_read)
    assert len(read) == 9
    for (kind, name), keys in read.items():
        assert {*formula_keys(kind, name)} == keys
