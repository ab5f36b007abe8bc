"""`megajax generate --chat` as a user has it: with arguments, a pipe and a terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from chains import CHATML, END, chain, chain_config, write_chain
from click.testing import Result
from support import megajax
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError

SAID = b'H\x1b[1mi'
SECONDS = 300  # until a process that hangs has failed
# Makes standard input the terminal of the session, from which Ctrl-C comes. Not between fork and
# exec, where jax's threads could leave a lock behind.
ON_A_TERMINAL = (
    'import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); '
    'os.execv(sys.argv[1], sys.argv[1:])'
)

ANSWER = """
from megajax.commands.generate_chat import _lines
for line in _lines(is_asked=True):
    print('answer to', line)
"""


@pytest.fixture(name='folder')
def enter_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(runs)
    return runs


@pytest.fixture(scope='module', name='runs')
def make_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that say SAID, say no end, and know no template; and a template."""
    folder = tmp_path_factory.mktemp('runs')
    (folder / 'chat.jinja').write_text(CHATML)
    template = {'chat_template': str(folder / 'chat.jinja')}
    write_chain(folder / 'polite', chain(SAID, then=END), chain_config(128, **template))
    endless = chain(b'ab', then=ord('a'))
    write_chain(folder / 'endless', endless, chain_config(4096, **template))
    write_chain(folder / 'silent', chain(SAID, then=END), chain_config())
    return folder


def command(run: str, *arguments: str) -> list[str]:
    generate = [sys.executable, '-m', 'megajax', 'generate', run]
    return [*generate, '--chat', '--temperature', '0', *arguments]


def chat(
    folder: Path, run: str, *arguments: str, typed: bytes = b''
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(run, *arguments),
        cwd=folder,
        input=typed,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )


def in_process(run: str, *arguments: str, typed: bytes = b'') -> Result:
    """The same without a process of its own, in the current folder."""
    return CliRunner().invoke(app, command(run, *arguments)[3:], input=typed)


class Terminal:
    """A terminal with the command on it; `read_until` returns what it showed."""

    def __init__(self, folder: Path, arguments: Sequence[str]):
        self._end, inside = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, '-c', ON_A_TERMINAL, *arguments],
            cwd=folder,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read_until(self, pattern: str) -> str:
        shown, last = '', time.monotonic() + SECONDS
        while not re.search(pattern, shown):
            assert time.monotonic() < last, shown
            if select.select([self._end], [], [], 1)[0]:
                shown += os.read(self._end, 10_000).decode()
        return shown

    def interrupt_until(self, pattern: str) -> None:
        """Press Ctrl-C until it has an effect: CPython's readline misses one before it waits.

        The terminal shows ^C for one that is missed, too.
        """
        shown, last = '', time.monotonic() + SECONDS
        while not re.search(pattern, shown):
            assert time.monotonic() < last, shown
            self.type('\x03')
            while not re.search(pattern, shown) and select.select([self._end], [], [], 5)[0]:
                shown += os.read(self._end, 10_000).decode()

    def wait(self) -> int:
        code = self._process.wait(SECONDS)
        os.close(self._end)
        return code


def test_each_prompt_is_a_turn_and_a_pipe_gets_the_text_as_it_is(folder: Path) -> None:
    done = in_process('polite', '--system', 'S', '--prompt', 'a', '--prompt', 'b')
    assert (done.exit_code, done.stdout_bytes, done.stderr) == (0, (SAID + b'\n') * 2, '')


def test_each_line_of_a_pipe_is_a_turn_and_old_turns_are_said_to_be_forgotten(
    folder: Path,
) -> None:
    done = in_process('polite', '--max-tokens', '9', typed=b'a\n\nb\nc\nd\ne')
    assert (done.exit_code, done.stdout_bytes) == (0, (SAID + b'\n') * 5)
    notes = done.stderr.splitlines()
    assert notes == ['note: dropped the oldest turns, which no longer fit: 1']


@pytest.mark.parametrize(
    ('run', 'arguments', 'typed', 'message'),
    [
        ('silent', [], b'a\n', 'data.chat_template: silent has no chat template: add data.chat_'),
        ('silent', ['data.chat_template=gone.jinja'], b'a\n', 'gone.jinja: cannot be read'),
        ('polite', [], b'x' * 200, 'this turn has 219 tokens in the chat template'),
        ('polite', [], b'\xff\n', 'is not UTF-8'),
        ('polite', ['--prompts', 'p.txt'], b'', '--chat takes its turns from --prompt or input'),
        ('polite', ['--images', '.'], b'', 'remove --images'),
        ('polite', ['--image', 'p.txt'], b'<image>', 'this is a text-only model'),
        (
            'polite',
            ['--image', 'p.txt', '--prompt', 'a'],
            b'',
            'contains <image> 0 times, but --image is given 1',
        ),
        (
            'polite',
            ['--image', 'p.txt', '--prompt', 'a', '--prompt', '<image>'],
            b'',
            'this is a text-only model',
        ),
    ],
)
def test_a_conversation_that_cannot_be_is_refused(
    run: str, arguments: list[str], typed: bytes, message: str, folder: Path
) -> None:
    (folder / 'p.txt').write_text('a')
    done = in_process(run, *arguments, typed=typed)
    assert isinstance(done.exception, ConfigError), done.output
    assert (done.exception.exit_code, done.output) == (2, '')
    (line,) = str(done.exception).splitlines()
    assert message in line


def test_a_system_message_without_a_conversation_is_refused(folder: Path) -> None:
    done = megajax('generate', 'polite', '--system', 'S', folder=folder)
    assert done.returncode == 2
    assert done.stderr == 'error: --system needs a chat: add --chat\n'


@pytest.mark.slow
def test_a_template_may_be_given_with_the_command(folder: Path) -> None:
    done = in_process('silent', 'data.chat_template=chat.jinja', '--prompt', 'a')
    assert (done.exit_code, done.stdout_bytes) == (0, SAID + b'\n'), done.stderr


@pytest.mark.slow
def test_a_terminal_obeys_no_answer_and_ctrl_d_ends_the_session(folder: Path) -> None:
    terminal = Terminal(folder, command('polite'))
    terminal.read_until('> ')
    terminal.type('hello\n')
    shown = terminal.read_until(r'i\r\n.*> ')
    assert r'H\x1b[1mi' in shown
    assert '\x1b[1m' not in shown
    terminal.type('\x04')
    assert terminal.wait() == 0


def test_a_file_gets_the_answers_and_the_terminal_the_prompts() -> None:
    end, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, '-c', ANSWER], stdin=inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.write(end, b'hello\n\x04')
    out, err = process.communicate(timeout=60)
    os.close(inside)
    os.close(end)
    assert (process.returncode, out, err) == (0, b'answer to hello\n', b'> > \n')


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_not_the_session(folder: Path) -> None:
    terminal = Terminal(folder, command('endless', '--max-tokens', '4000'))
    terminal.read_until('> ')
    terminal.type('x')  # a line that is being typed
    terminal.read_until('x')
    terminal.interrupt_until('> ')
    for _ in range(2):
        terminal.type('hello\n')
        shown = terminal.read_until('(ab){20}')
        terminal.type('\x03')
        shown += terminal.read_until('> ')
        assert shown.count('ab') < 1900
    terminal.type('\x04')
    assert terminal.wait() == 0
