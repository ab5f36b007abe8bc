"""Each pair of the table of conflicts is rejected, with its reason and what to use instead."""

import re
from pathlib import Path

import pytest
from features import VALUES
from ruamel.yaml import YAML
from support import ROOT
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError, load
from megajax.core.config.conflicts import CONFLICTS, FEATURES, Conflict
from megajax.core.config.load import dump_sections


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load('gpt2_124m', overrides)
    return str(error.value)


def test_the_rows_name_features_and_no_pair_twice() -> None:
    assert {name for row in CONFLICTS for name in (row.one, row.other)} <= FEATURES.keys()
    pairs = [frozenset((row.one, row.other)) for row in CONFLICTS]
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize('row', CONFLICTS, ids=lambda row: f'{row.one}, {row.other}')
def test_each_row_is_rejected_with_its_reason_and_what_to_do_instead(row: Conflict) -> None:
    settings = (VALUES.get(setting, setting) for setting in (row.one, row.other))
    said = refusal(*(one for setting in settings for one in setting.split(' ')))
    assert f'{row.reason}; {row.instead}' in said


@pytest.mark.parametrize('row', CONFLICTS, ids=lambda row: f'{row.one}, {row.other}')
def test_a_conflict_with_the_file_is_reported_at_the_override(
    row: Conflict, tmp_path: Path
) -> None:
    in_file, added = (VALUES.get(each, each).split() for each in (row.other, row.one))
    settings = YAML(typ='safe').load(ROOT / 'configs/gpt2_124m.yaml')
    for section, key, value in (re.split('[.=]', each, maxsplit=2) for each in in_file):
        settings[section] = settings.get(section, {}) | {key: YAML(typ='safe').load(value)}
    (tmp_path / 'my.yaml').write_text(dump_sections(settings))
    with pytest.raises(ConfigError) as error:
        load(tmp_path / 'my.yaml', added)
    (place,) = {one.place for one in error.value.problems if row.reason in one.message}
    assert place in [f'override {each}' for each in added]


@pytest.mark.parametrize('row', CONFLICTS, ids=lambda row: f'{row.one}, {row.other}')
def test_each_row_is_printed(row: Conflict) -> None:
    lines = CliRunner().invoke(app, ['config', 'conflicts']).output.splitlines()
    (line,) = [line for line in lines if line.startswith(row.one) and row.other in line]
    assert row.reason in line
    assert row.instead in line


def test_the_former_name_of_the_command_prints_the_same_and_is_hidden() -> None:
    new, former, listed = (
        CliRunner().invoke(app, ['config', name]).output
        for name in ('conflicts', 'combinations', '--help')
    )
    assert new == former
    assert 'conflicts' in listed
    assert 'combinations' not in listed


def test_attention_is_as_the_objective_needs_it() -> None:
    assert load('tiny').model.attention == 'causal'
    assert load('tiny_bert').model.attention == 'bidirectional'
