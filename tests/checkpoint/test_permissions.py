"""A checkpoint that this user must not read is refused by name, and never taken for none."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FIRST_RUN = Path(__file__).parents[1] / 'run/data/first_release/run'
# What root may do beyond other users is given up: the three numbers are those of capset(2).
AS_ORDINARY_USER = """
import ctypes, struct, sys
VERSION = 0x20080522
header = ctypes.create_string_buffer(struct.pack('Ii', VERSION, 0))
assert ctypes.CDLL(None).capset(header, ctypes.create_string_buffer(24)) == 0
from megajax.commands.main import main
main()
"""


def ran(*arguments: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, '-c', AS_ORDINARY_USER, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    run = Path(shutil.copytree(FIRST_RUN, tmp_path / 'run'))
    yield run
    for path in (run / 'checkpoints', *(run / 'checkpoints').iterdir()):
        path.chmod(0o755)


@pytest.mark.parametrize('name', ['checkpoints', 'checkpoints/3'])
@pytest.mark.parametrize('command', ['checkpoint verify', 'checkpoint ls', 'compare', 'export hf'])
def test_a_folder_that_must_not_be_read_is_named(run: Path, name: str, command: str) -> None:
    (run / name).chmod(0)
    second = {'compare': ['run'], 'export hf': ['out']}.get(command, [])
    code, said = ran(*command.split(), 'run', *second, folder=run.parent)
    assert code == 2, said
    assert said.startswith(f'error: run/{name}')
    assert said.endswith(
        'cannot be read: Permission denied; let this user read the folder of the run\n'
    )


def test_a_run_that_must_not_be_entered_is_named(run: Path) -> None:
    run.chmod(0)
    code, said = ran('compare', 'run', 'run', folder=run.parent)
    run.chmod(0o755)
    assert code == 2, said
    assert said.startswith('error: run/config.json cannot be read: Permission denied')


def test_digests_that_must_not_be_read_are_not_called_damaged(run: Path) -> None:
    (run / 'checkpoints/3/SHA256SUMS').chmod(0)
    code, said = ran('checkpoint', 'verify', 'run', folder=run.parent)
    assert (code, said) == (4, '3  1 wrong\n  SHA256SUMS cannot be read: Permission denied\n')
