"""Foreign text in a message is short, and a terminal shows it instead of obeying it."""

import logging
import os
import pty
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import megajax

from megajax.base.errors import reason
from megajax.base.render.logs import log_to_terminal
from megajax.base.render.text import folded, shorten, visible
from megajax.commands.generate_output import as_text
from megajax.core.config import CheckpointError, ConfigError, load
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.generate.continuation import Continuation

CLEAR = '\x1b[2J\x1b]0;title\x07'
OBEYED = [*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), '\u202e', '\u2066', '\u2028']


@given(st.text())
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = visible(text + ''.join(OBEYED))
    assert not set(OBEYED) - {'\n', '\t'} & set(shown)
    assert visible(shown) == shown


def test_text_of_any_language_stays_as_it_is() -> None:
    text = 'größe 語 עברית 👩‍👩‍👧 a\tb\n'
    assert visible(text) == text
    assert visible(CLEAR) == r'\x1b[2J\x1b]0;title\x07'
    assert visible('a\u202eb') == r'a\u202eb'
    assert visible(os.fsdecode(b'caf\xe9')) == r'caf\udce9'


@given(st.text(), st.integers(40, 200))
def test_a_short_text_has_both_ends_and_its_length(text: str, limit: int) -> None:
    short = shorten(text * 9, limit)
    assert len(short) <= limit
    assert short == text * 9 or f'({len(text * 9):,} characters)' in short


def test_errors_and_their_reasons_are_visible() -> None:
    for error in (ConfigError(CLEAR), CheckpointError(CLEAR)):
        assert str(error) == visible(CLEAR)
    assert reason(ValueError(CLEAR)) == visible(CLEAR)


def test_a_key_forges_no_line_of_a_message(tmp_path: Path) -> None:
    file = tmp_path / 'run.yaml'
    file.write_text('"a\\nerror: b\\e[2J": 1\n')
    done = megajax('config', 'show', file)
    assert done.returncode == 2
    assert rf'{file}:1: a\nerror: b\x1b[2J: unknown key' in done.stderr
    assert '\nerror: b' not in done.stderr
    with pytest.raises(ConfigError) as error:
        load(file)
    assert '\x1b' not in str(error.value)


def test_warnings_are_visible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, 'handlers', [])
    log_to_terminal()
    logging.getLogger('megajax').warning('unused keys: %s', CLEAR)
    assert capsys.readouterr().err == f'unused keys: {visible(CLEAR)}\n'


def test_a_warning_is_broken_at_its_spaces_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv('COLUMNS', '60')
    warning = 'data.corpus: 3 documents spell special tokens, which are read as letters ' * 3
    for is_terminal in (True, False):
        monkeypatch.setattr(logging.root, 'handlers', [])
        monkeypatch.setattr(sys.stderr, 'isatty', lambda is_terminal=is_terminal: is_terminal)
        log_to_terminal()
        logging.getLogger('megajax').warning(warning)
        said = capsys.readouterr().err
        assert said == (f'{folded(warning, 60)}\n' if is_terminal else f'{warning}\n')
    assert len(folded(warning, 60).splitlines()) > 3


@pytest.mark.parametrize('is_terminal', [True, False])
def test_a_pipe_gets_the_text_as_it_is(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    with open(writer, 'w') as output:
        monkeypatch.setattr(sys, 'stdout', output)
        row = Continuation([*b'a'], byte_tokenizer(), limit=len(CLEAR), ends=[256])
        row.add([*CLEAR.encode()])
        as_text(['a'])([row])
        monkeypatch.undo()
        got = os.read(reader, 100).decode()
    os.close(reader)
    assert got.strip() == 'a' + (visible(CLEAR) if is_terminal else CLEAR)


def test_a_broken_line_has_its_words_and_the_indentation_of_its_value() -> None:
    path = 'runs/' + 'x' * 60
    for line, indent in (
        (f'metrics    {path}, and more words', 11),
        (f'step 1  waited for data {path} and more words', 4),
    ):
        first, *others = folded(line, 50).split('\n')
        assert others
        assert all(part.startswith(' ' * indent) for part in others)
        assert ' '.join([first, *map(str.strip, others)]).split() == line.split()
    assert folded('x' * 200, 50) == 'x' * 200
    table = '| a    b |'
    assert folded(f'\n{table}\n', 50).split('\n') == ['', table]
