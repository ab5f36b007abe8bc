"""A problem between keys stands at what was written last to cause it, not at what was sound."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML
from support import exhaustive

from megajax.config import Config, ConfigError, reload
from megajax.config.keys import sources

CONFIGS = Path(__file__).parents[2] / 'configs'
PRESETS = [
    'tiny_arr_coc',
    'megatron_8.3b',
    *(
        exhaustive(name)
        for name in ('gpt2_124m', 'tiny_vlm', 'tiny_bert', 'llama3_8b', 'arr_coc_32b')
    ),
]


@functools.cache
def written(preset: str) -> dict[str, dict[str, Any]]:
    return YAML(typ='safe', pure=True).load(CONFIGS / f'{preset}.yaml')


def other_values(value: Any, annotation: Any) -> Iterator[Any]:
    """Yield a few other values of a key, most of them possible."""
    match value:
        case bool():
            yield not value
        case int():
            yield from (value + 1, value - 1, 2 * value, 3 * value, value // 2, 1000 * value)
        case float():
            yield from (2 * value, value / 2, 100 * value)
        case str():
            yield from (each for each in get_args(annotation) if isinstance(each, str))
        case (int(), *_):
            yield from ([each + 1 for each in value], [2 * each for each in value], [])


def overrides(preset: str) -> Iterator[str]:
    """Yield `section.key=value` for other values of each key that a preset has, set or not."""
    config = reload(written(preset), place=preset)
    for name in Config.model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items() if section else ():
            for value in other_values(getattr(section, key), field.annotation):
                yield f'{name}.{key}={str(value).lower()}'


def places(preset: str, override: str) -> set[str]:
    """Return where the problems stand that an override makes."""
    try:
        reload(written(preset), [override], place=preset)
    except ConfigError as error:
        return {problem.place for problem in error.problems}
    return set()


@pytest.mark.parametrize('preset', PRESETS)
def test_whatever_one_override_makes_impossible_stands_at_it(preset: str) -> None:
    found = {override: places(preset, override) for override in overrides(preset)}
    refused = {override: where for override, where in found.items() if where}
    assert len(refused) > 20
    assert refused == {override: {f'override {override}'} for override in refused}


def test_a_default_follows_from_the_keys_of_its_formula() -> None:
    assert sources('model.head_dim') == ['model.hidden_size', 'model.num_heads']
    assert sources('vision.ffn_size') == ['vision.hidden_size']
    assert sources('model.hidden_size') == sources('lora') == []
