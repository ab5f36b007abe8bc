"""Whatever a file holds, it is read or refused at once, in a message that a terminal can show."""

import math
import random
import string
import time
from pathlib import Path

import pytest
from ruamel.yaml.error import YAMLError

from megajax.base.errors import MAX_PROBLEMS
from megajax.core.config import ConfigError, dump, load
from megajax.core.config.bounded_yaml import MAX_NODES, explain, parse
from megajax.core.config.records import read_record
from megajax.core.config.section import Section

ROOT = Path(__file__).parents[3]
MODEL = (
    'model: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 1000, max_seq_len: 1024}\n'
)
NINE = '[' + ','.join(['*a{0}'] * 9) + ']'
BOMB = 'a: &a0 [x]\n' + ''.join(f'b{i}: &a{i + 1} {NINE.format(i)}\n' for i in range(9))
# A file, what its message says, and the line that it names, 0 for none.
HOSTILE = {
    'bomb': (BOMB, 'more than 5,000 keys and values', 5),
    'many bytes': ('x: 1\n' * 2_000_000, 'more than 100,000 bytes', 0),
    'many keys': ('x: 1\n' * 5_000, 'more than 5,000 keys and values', 2_500),
    'brackets': (
        MODEL + 'train: {steps: ' + '[' * 5_000,
        'more than 20 nested groups and lists',
        2,
    ),
    'dashes': ('- ' * 5_000, 'more than 20 nested groups and lists', 1),
    'digits': (MODEL + f'train:\n  steps: {"9" * 5_000}', 'a number with 5,000 digits', 3),
    'directive': (f'%YAML {"9" * 5_000}.1\n---\n', 'not valid YAML: Exceeds the limit', 0),
    'escape': (r'a: "\U7fffffff"', 'not valid YAML: chr()', 0),
    'surrogate': (r'data: {corpus: "\ud800"}', 'an unpaired surrogate', 1),
    'alias of itself': ('train: &a {profile: *a}', 'the alias *a contains itself', 1),
    'tag': ('train: {steps: !!int abc}', 'not valid YAML: tags such as !!int are not supported', 1),
    'key': ('train: {[steps]: 1}', 'a key that is a group or a list', 1),
}


def refused(file: Path, *overrides: str) -> list[str]:
    begin = time.process_time()
    with pytest.raises(ConfigError) as error:
        load(file, overrides)
    message = str(error.value)
    assert time.process_time() - begin < 5  # minutes, without the limits
    assert len(message) < 20_000
    return message.splitlines()


@pytest.mark.parametrize('name', HOSTILE)
def test_what_is_no_config_is_refused_at_once_by_line(name: str, tmp_path: Path) -> None:
    text, why, line = HOSTILE[name]
    file = tmp_path / 'run.yaml'
    file.write_text(text)
    (message,) = refused(file)
    assert message.startswith(f'{file}:{line}: {why}' if line else f'{file}: {why}')


def test_a_device_without_an_end_is_no_config() -> None:
    (message,) = refused(Path('/dev/zero'))
    assert message == '/dev/zero: more than 100,000 bytes; a config has about 1,000'


def test_thousands_of_problems_are_some_dozens_and_a_number(tmp_path: Path) -> None:
    file = tmp_path / 'run.yaml'
    file.write_text(MODEL + 'train:\n' + ''.join(f'  step{i}: 1\n' for i in range(2_400)))
    *shown, last = refused(file)
    assert len(shown) == MAX_PROBLEMS
    assert shown[0] == f'{file}:3: train.step0: unknown key; did you mean train.steps?'
    assert last == f'and {2_400 - MAX_PROBLEMS:,} more'


def test_a_long_value_and_a_long_key_are_shortened(tmp_path: Path) -> None:
    file, long = tmp_path / 'run.yaml', 'x' * 40_000
    file.write_text(
        f'{MODEL}train: {{dtype: {long}, steps: {[1] * 2_000}}}\nmesh:\n  ? {long}\n  : 1'
    )
    messages = refused(file, f'train.{long}={long}', f'train.overlap={long}')
    assert len(messages) == 5
    assert all(len(message) < 1_000 for message in messages)
    assert any('...(40,002 characters)...' in message for message in messages)


def test_anchors_and_merged_groups_are_read(tmp_path: Path) -> None:
    file = tmp_path / 'run.yaml'
    file.write_text(
        MODEL + 'data: {blend: &a {x: 1, y: 2}}\ntrain: {profile: {<<: &p {start: 1}, steps: 2}}\n'
    )
    config = load(file)
    assert config.data.blend == {'x': 1, 'y': 2}
    assert config.train.profile is not None
    assert (config.train.profile.start, config.train.profile.steps) == (1, 2)
    assert load(file) == config
    assert parse('- &a {b: 1}\n- *a\n- *a') == [{'b': 1}] * 3


def test_a_value_that_a_caller_changes_is_read_again_as_it_was() -> None:
    text = '{a: {<<: {b: 1}, c: [2]}}'
    first = parse(text)
    first['a']['c'].append(3)
    first['a']['b'] = 4
    assert parse(text) == {'a': {'b': 1, 'c': [2]}}


def test_an_alias_counts_as_what_it_stands_for() -> None:
    text = f'- &a [{"1, " * 1_000}]\n' + '- *a\n'
    assert len(parse(text)) == 2
    with pytest.raises(YAMLError, match=f'more than {MAX_NODES:,} keys and values'):
        parse(text + '- *a\n' * 3)


@pytest.mark.parametrize('text', ['-_', '+_', '0x_', '-0x_', '0b_', '0o_', '._', '-._', '__'])
def test_a_number_without_digits_is_text(text: str) -> None:
    assert parse(f'{{{text}: [{text}]}}') == {text: [text]}
    config = load('tiny', [f'run.dir={text}'])
    assert config.run.dir == text
    assert parse(dump(config))['run']['dir'] == text


def test_numbers_are_read_as_such() -> None:
    assert parse('[1, -2, 0x1f, 0o17, 1_000, 3e-4, .5, -.inf]') == [
        *(1, -2, 31, 15, 1000),
        *(3e-4, 0.5, -math.inf),
    ]


def test_a_changed_preset_is_read_or_refused_and_never_a_bug() -> None:
    draw = random.Random(5)
    presets = [file.read_text() for file in sorted((ROOT / 'configs').glob('*.yaml'))]
    pieces = [
        *string.punctuation,
        '\n',
        '\0',
        '\x85',
        '<<: ',
        '&a ',
        '*a',
        '%YAML 1.',
        '"\\x',
        '|9',
    ]
    outcomes = set()
    for _ in range(400):
        text = draw.choice(presets)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(pieces) * draw.choice([1, 1, 30]) + text[at + 1 :]
        try:
            parse(text)
            outcomes.add('read')
        except YAMLError as error:
            outcomes.add('refused' if len(explain(error)) < 400 else 'refused at length')
    assert outcomes == {'read', 'refused'}


def test_a_record_is_bounded_as_a_config_is(tmp_path: Path) -> None:
    file = tmp_path / 'gpu.yaml'
    file.write_text(BOMB)
    with pytest.raises(ConfigError, match='more than 5,000 keys and values'):
        read_record(file, Section)
