"""`megajax data build` from the command line: a forgotten OUT, and an interrupt."""

import pytest
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError

MISSING = (
    'OUT: missing, because all words after --input are inputs, also web; put OUT before --input'
)


@pytest.mark.parametrize(
    'words', ['--input a.jsonl web --tokenizer bytes', '--input a.jsonl b.jsonl web']
)
def test_an_out_that_is_read_as_an_input_is_named(words: str) -> None:
    error = CliRunner().invoke(app, ['data', 'build', *words.split()]).exception
    assert isinstance(error, ConfigError)
    assert str(error) == MISSING


@pytest.mark.parametrize('words', ['--input a.jsonl', '--input a.jsonl b.jsonl --no-such-option'])
def test_other_mistakes_have_their_own_message(words: str) -> None:
    done = CliRunner().invoke(app, ['data', 'build', *words.split()])
    assert done.exit_code == 2
    assert 'put OUT before' not in f'{done.output} {done.exception}'


def test_an_interrupt_says_which_builds_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr('megajax.corpus.build.build', interrupted)
    done = CliRunner().invoke(app, ['data', 'build', 'web', '--input', '-', '--tokenizer', 'bytes'])
    assert done.exit_code == 130
    assert 'unless it reads a stream, or a URL for which the server gives neither' in done.output
