"""`megajax config keys` on a terminal and in a pipe, and the page made of it."""

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megajax.commands import config_keys
from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.core.config.keys import keys_in

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ['config', 'keys', *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_what_the_schema_says() -> None:
    page = (ROOT / 'docs/config.md').read_text()
    assert page == run('--markdown'), 'megajax config keys --markdown > docs/config.md'


def test_a_pipe_has_a_line_for_each_key_with_all_of_its_meaning() -> None:
    head, *lines = run().splitlines()
    assert head.split() == ['key', 'type', 'default', 'meaning']
    assert len(lines) == len(keys_in())
    for line, key in zip(lines, keys_in(), strict=True):
        assert line.startswith(f'{key.path} ')
        assert line.endswith(f' {key.meaning}')
        assert f' {key.type}, {key.unit} ' in line if key.unit else f' {key.type} ' in line


@pytest.mark.parametrize('width', [80, 100])
def test_a_terminal_cuts_no_key_and_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(config_keys, 'plain_console', lambda **_: console)
    lines = run().splitlines()
    assert max(map(len, lines)) <= width
    shown = [line.split()[0] for line in lines if line[:1].strip()]
    assert shown[1:] == [key.path for key in keys_in()]
    words = ' '.join(lines).split()
    for key in keys_in():
        assert {*key.meaning.split()} <= {*words}, key.path


def test_an_unknown_section_is_a_mistake_of_the_user() -> None:
    result = CliRunner().invoke(app, ['config', 'keys', 'mseh'])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == 'mseh: no such section or key; did you mean mesh?'
