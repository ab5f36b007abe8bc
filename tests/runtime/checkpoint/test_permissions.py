"""A checkpoint that this user must not read is refused by name, and never taken for none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[2]
FIRST_RUN = TESTS / 'runtime/run/data/first_release/run'
# What root may do beyond other users is given up: the three numbers are those of capset(2).
AS_ORDINARY_USER = """
import ctypes, struct
VERSION = 0x20080522
header = ctypes.create_string_buffer(struct.pack('Ii', VERSION, 0))
assert ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24)) == 0
import json, sys
from pathlib import Path
from support import megajax
calls = json.loads(sys.argv[1])
done = [(folder, megajax(*words, folder=Path(folder))) for folder, words in calls.items()]
print(json.dumps({folder: (one.returncode, one.stdout + one.stderr) for folder, one in done}))
"""
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
    folder, calls = tmp_path_factory.mktemp('closed'), {}
    for number, (command, closed) in enumerate(CASES):
        shutil.copytree(FIRST_RUN, folder / str(number) / 'run')
        (folder / str(number) / closed).chmod(0)
        second = {'compare': ['run'], 'export hf': ['out']}.get(command, [])
        calls[str(folder / str(number))] = [*command.split(), 'run', *second]
    done = subprocess.run(
        [sys.executable, '-c', AS_ORDINARY_USER, json.dumps(calls)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    for number, (_, closed) in enumerate(CASES):
        (folder / str(number) / closed).chmod(0o755)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout).values(), strict=True))


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
    assert found == [4, '3  1 wrong\n  SHA256SUMS cannot be read: Permission denied\n']
