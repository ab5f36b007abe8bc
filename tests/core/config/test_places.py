"""A problem between keys is reported at the override that caused it, not at a sound line."""

import functools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from ruamel.yaml import YAML
from support import ROOT, exhaustive

from megajax.core.config import Config, ConfigError, reload
from megajax.core.config.keys import sources

# A preset, and what is laid over it.
CASES = {
    'relevance': ('tiny_arr_coc', ''),
    'pictures': ('tiny_vlm', 'vision: {max_patches: 96, min_patches: 60, deepstack: [0, 2]}'),
    'model': ('megatron_8.3b', ''),
    'float16': ('gpt2_124m', 'train: {dtype: float16, loss_scale: 1024}\ndata: {corpus: web}'),
    'odd': ('gpt2_124m', 'model: {head_dim: 63}\ntrain: {seq_len: 4}'),
    'stages': (
        'gpt2_124m',
        'mesh: {data: 4, stages: 2, virtual_stages: 3}\n'
        'train: {microbatches: 4, dtype: bfloat16, steps: 3000, profile: {start: 2900, steps: 9}}',
    ),
    'grid': (
        'gpt2_124m',
        'mesh: {data: 4, model: 2, model_rows: 2, sequence_parallel: true}\n'
        'optim: {shard: weights}\nmodel: {num_kv_heads: 4}\n'
        'train: {deterministic: true, replay_every: 9, microbatches: 2}',
    ),
    'context': (
        'llama3_8b',
        'mesh: {data: 2, model: 8, context: 2, sequence_parallel: true}\n'
        'train: {seq_len: 4096}\noptim: {warmup_steps: 100, decay_steps: 200}',
    ),
    'halves of rows': ('llama3_8b', 'train: {overlap: batch_split}'),
    'halves of tokens': (
        'llama3_8b',
        'mesh: {data: 2, model: 8, sequence_parallel: true}\ntrain: {overlap: sequence_split}',
    ),
    'adapters': ('llama3_8b', 'lora: {rank: 8}'),
    'three numbers': (
        'llama3_8b',
        'model: {position: mrope, mrope_section: [24, 20, 20]}\nmesh: {replicas: 4}',
    ),
}
PLAIN = 'gpt2_124m', 'llama3_8b', 'arr_coc_32b'  # of which CASES have more keys


@functools.cache
def written(case: str) -> dict[str, dict[str, Any]]:
    yaml = YAML(typ='safe', pure=True)
    preset, over = CASES.get(case, (case, ''))
    settings, over = yaml.load(ROOT / f'configs/{preset}.yaml'), yaml.load(over) or {}
    return {name: settings.get(name, {}) | over.get(name, {}) for name in {*settings, *over}}


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
        case dict():
            yield {'web': 1.0}
        case (int(), *_):
            yield from ([each + 1 for each in value], [2 * each for each in value], [])


def overrides(case: str) -> Iterator[str]:
    """Yield `section.key=value` for other values of each key that a config has, set or not."""
    config = reload(written(case), place=case)
    for name in Config.model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items() if section else ():
            for value in other_values(getattr(section, key), field.annotation):
                yield f'{name}.{key}={str(value).lower()}'


def places(case: str, override: str) -> set[str]:
    """Return where the problems stand that an override makes."""
    try:
        reload(written(case), [override], place=case)
    except ConfigError as error:
        return {problem.place for problem in error.problems}
    return set()


@pytest.mark.parametrize('case', [*CASES, 'tiny_bert', *map(exhaustive, PLAIN)])
def test_whatever_one_override_makes_impossible_stands_at_it(case: str) -> None:
    found = {override: places(case, override) for override in overrides(case)}
    refused = {override: where for override, where in found.items() if where}
    assert len(refused) > 20
    assert refused == {override: {f'override {override}'} for override in refused}


def test_a_default_follows_from_the_keys_of_its_formula() -> None:
    assert sources('model.head_dim') == ['model.hidden_size', 'model.num_heads']
    assert sources('vision.ffn_size') == ['vision.hidden_size']
    assert sources('model.hidden_size') == sources('lora') == []
