"""A checkpoint that this user must not read is refused by name, and never taken for none."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ordinary_user import as_ordinary_user
from support import megajax

TESTS = Path(__file__).parents[2]
FIRST_RUN = TESTS / 'runtime/run/data/first_release/run'
COMMANDS = 'checkpoint verify', 'checkpoint ls', 'compare', 'export hf'
CLOSED = 'run/checkpoints', 'run/checkpoints/3', 'run', 'run/checkpoints/3/SHA256SUMS'
CASES = [
    *((command, closed) for closed in CLOSED[:2] for command in COMMANDS),
    ('compare', CLOSED[2]),
    ('checkpoint verify', CLOSED[3]),
]


@pytest.fixture(scope='module')
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, str]]:
    """The exit code and the words of each command, by what it must not read."""
    found = {}
    for number, (command, closed) in enumerate(CASES):
        folder = tmp_path_factory.mktemp(f'closed{number}')
        shutil.copytree(FIRST_RUN, folder / 'run')
        (folder / closed).chmod(0)
        second = {'compare': ['run'], 'export hf': ['out']}.get(command, [])
        call = partial(megajax, *command.split(), 'run', *second, folder=folder)
        done = as_ordinary_user(call)
        (folder / closed).chmod(0o755)
        found[command, closed] = done.returncode, done.stdout + done.stderr
    return found


@pytest.mark.parametrize('closed', CLOSED[:2])
@pytest.mark.parametrize('command', COMMANDS)
def test_a_folder_that_must_not_be_read_is_named(said: Any, closed: str, command: str) -> None:
    code, words = said[command, closed]
    assert code == 2, words
    assert words.startswith(f'error: {closed}')
    assert words.endswith(
        'cannot be read: Permission denied; let this user read the folder of the run\n'
    )


def test_a_run_that_must_not_be_entered_is_named(said: Any) -> None:
    code, words = said['compare', 'run']
    assert code == 2, words
    assert words.startswith('error: run/config.json cannot be read: Permission denied')


def test_digests_that_must_not_be_read_are_not_called_damaged(said: Any) -> None:
    found = said['checkpoint verify', CLOSED[3]]
    assert found == (4, '3  1 wrong\n  SHA256SUMS cannot be read: Permission denied\n')
