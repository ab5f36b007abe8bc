"""A record that no run wrote is refused, or has no step and no loss; two show changed data."""

import json
from pathlib import Path
from typing import Any

import pytest
from support import make_config
from vlm import relevant

from megajax.runtime.checkpoint.record import (
    RECORD,
    VALIDATION,
    changed_corpora,
    config_differences,
    is_fixed,
    make_record,
    read_record,
    recorded_step,
)

NONE = ['[' * 100_000, f'1{400 * "0"}', '-Infinity', 'null', '{}', '"7"x', '\udcff']


def write(folder: Path, **changes: Any) -> None:
    record = json.loads(make_record(make_config(), 7).model_dump_json())
    (folder / RECORD).write_text(json.dumps(record | changes))


@pytest.mark.parametrize('step', NONE)
def test_a_step_that_is_none_is_told_as_that(tmp_path: Path, step: str) -> None:
    content = f'{{"step": {step}}}'.encode(errors='surrogateescape')
    (tmp_path / RECORD).write_bytes(content)
    assert recorded_step(tmp_path) in (None, 10**400)


@pytest.mark.parametrize('loss', NONE)
def test_a_loss_that_is_none_is_left_out(tmp_path: Path, loss: str) -> None:
    write(tmp_path)
    (tmp_path / VALIDATION).write_bytes(loss.encode(errors='surrogateescape'))
    assert read_record(tmp_path).validation_loss in (None, float('-inf'))


def test_keys_that_have_no_effect_today_change_no_model() -> None:
    now = make_record(make_config(model={'position': 'learned'}), 7)
    model = now.config['model'] | {'rope_theta': 500_000.0}
    old = now.model_copy(update={'config': now.config | {'model': model}})
    assert config_differences(old, now) == {}


@pytest.mark.parametrize('size', [None, 'two', [2], 10**400, 2.5])
def test_the_mesh_of_another_program_is_shown_as_it_is(tmp_path: Path, size: Any) -> None:
    write(tmp_path, config={'mesh': {'data': 2, 'stages': size}, 'optim': {'shard': [size]}})
    assert f'stages={size}' in read_record(tmp_path).mesh
    assert f'[{size!r}]' in read_record(tmp_path).mesh


@pytest.mark.parametrize(
    ('key', 'value', 'is_asked'),
    [
        ('split', '9,1,0', True),
        ('chat_template', 'other.jinja', True),
        ('order', 'streamed', True),
        ('order', 'megatron', False),
        ('document_mask', True, False),
        ('ignored_keys', ('id',), False),
        ('tokenizer', 'run/tokenizer.json', False),
        ('blend', {'corpus': 1.0, 'another': 2.0}, False),
    ],
)
def test_only_keys_that_change_the_contents_of_a_corpus_ask_for_other_contents(
    key: str, value: Any, is_asked: bool
) -> None:
    there = make_record(make_config(), 2, data={'corpus': 'a'})
    asking = make_config(data={key: value})
    changed = changed_corpora(there, make_record(asking, 2, data={'corpus': 'b', 'another': 'c'}))
    assert changed == ({} if is_asked else {'corpus': ('a', 'b')})


@pytest.mark.parametrize('key', ['run/tokenizer.json', 'auto'])
@pytest.mark.parametrize('sha256', ['x', 'y', None])
def test_a_text_in_the_tokens_of_a_tokenizer_that_the_config_names_anew_is_the_same_text(
    key: str, sha256: str | None
) -> None:
    there = make_record(make_config(), 2, data={'corpus': 'a'}, tokenizer_sha256='x')
    config = make_config(data={'tokenizer': key})
    here = make_record(config, 2, data={'corpus': 'b'}, tokenizer_sha256=sha256)
    is_other = (key, sha256) == ('run/tokenizer.json', 'y')
    assert changed_corpora(there, here) == ({} if is_other else {'corpus': ('a', 'b')})


@pytest.mark.parametrize(
    ('section', 'key', 'value', 'is_said'),
    [
        ('vision', 'image_token', 3, False),
        ('relevance', 'total_tokens', 300, False),
        ('relevance', 'regions', (1, 2), False),
        ('train', 'batch_size', 4, True),
        ('optim', 'lr', 1.0, True),
    ],
)
def test_what_changes_the_rows_of_the_same_images_is_no_change_of_the_images(
    section: str, key: str, value: Any, is_said: bool
) -> None:
    there = make_record(relevant(), 2, data={'corpus': 'a'})
    asking = relevant(**{section: {key: value}})
    changed = changed_corpora(there, make_record(asking, 2, data={'corpus': 'b'}))
    assert changed == ({'corpus': ('a', 'b')} if is_said else {})


@pytest.mark.parametrize(
    ('key', 'is_free'),
    [('total_tokens', True), ('regions', False), ('scorer_size', False), ('scorer_shards', False)],
)
def test_a_resumed_run_may_change_the_tokens_of_an_image_and_not_its_regions_or_scorers(
    key: str, is_free: bool
) -> None:
    assert is_fixed(f'relevance.{key}', 1, 2) != is_free
