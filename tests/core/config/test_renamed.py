"""A key that was renamed works for one release, says its new name, and loads from old records."""

import logging
from pathlib import Path

import pytest

from megajax.core.config import ConfigError, load, reload
from megajax.runtime.checkpoint.record import Record, config_differences

MODEL = '{num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 1000, max_seq_len: 1024}'


@pytest.mark.parametrize(('old', 'new'), [('default', 'auto'), ('overlap', 'batch_split')])
def test_an_old_name_on_the_command_line_is_the_new_key_with_a_warning(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load('tiny', [f'train.xla={old}'])
    assert config == load('tiny', [f'train.overlap={new}'])
    (said,) = caplog.messages
    assert said == (
        f'override train.xla={old}: train.xla={old} is now train.overlap={new}; '
        'the old name works in this release only'
    )


def test_an_old_name_in_a_file_is_named_with_its_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / 'run.yaml'
    file.write_text(f'model: {MODEL}\ntrain:\n  xla: overlap\n')
    assert load(file).train.overlap == 'batch_split'
    assert caplog.messages[0].startswith(f'{file}:3: train.xla=overlap is now')


def test_an_old_record_loads_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    sections = load('tiny').model_dump(mode='json')
    del sections['train']['overlap']
    sections['train']['xla'] = 'overlap'
    assert reload(sections, place='a record').train.overlap == 'batch_split'
    assert not caplog.messages


def test_a_run_goes_on_as_it_was_under_the_new_name() -> None:
    sections = load('tiny', ['train.overlap=batch_split']).model_dump(mode='json')
    old = {**sections, 'train': {**sections['train'], 'xla': 'overlap'}}
    del old['train']['overlap']
    before, after = (Record.model_construct(config=config) for config in (old, sections))
    assert not config_differences(before, after)


def test_a_wrong_value_is_a_mistake_of_the_new_key() -> None:
    with pytest.raises(
        ValueError,
        match=r"train\.overlap: must be 'auto', 'none', 'batch_split' or 'sequence_split'",
    ):
        load('tiny', ['train.xla=on'])


@pytest.mark.parametrize('names', ['overlap xla', 'xla overlap'])
def test_both_names_of_a_key_are_written_twice(names: str, tmp_path: Path) -> None:
    file, (first, second) = tmp_path / 'run.yaml', names.split()
    values = {'overlap': 'none', 'xla': 'overlap'}
    lines = f'  {first}: {values[first]}\n  {second}: {values[second]}\n'
    file.write_text(f'model: {MODEL}\ntrain:\n{lines}')
    message = rf'yaml:4: train.{second}: is another name of the key on line 3; delete one'
    with pytest.raises(ConfigError, match=message):
        load(file)
