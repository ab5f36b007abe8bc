"""What is wrong with the machine is said before a run starts, and what the user has set stays."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from runs import CONFIG, finish, start
from support import write_run

from megajax.runtime.run.watchdog import STALLED

pytestmark = pytest.mark.faults

PATIENCE = '--xla_cpu_collective_call_terminate_timeout_seconds'
SHOW = """
import os
from megajax.core.parallel.mesh import make_mesh
make_mesh(1, 2)
print(os.environ['XLA_FLAGS'])
"""

# The last process hangs.
HANG = """
import time
from megajax.runtime.run import run, watchdog_limits

def hang(*_):
    if watchdog_limits.global_state.process_id == {last}:
        time.sleep(1000)
    return begin(*_)

watchdog_limits.START = 4.0
begin, run.{name} = run.{name}, hang
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, CONFIG)


@pytest.mark.parametrize(
    ('own', 'then'),
    [
        ('', f'{PATIENCE}=600'),
        (f'{PATIENCE}=123', f'{PATIENCE}=123'),
        ('--xla_cpu_enable_fast_math=false', f'--xla_cpu_enable_fast_math=false {PATIENCE}=600'),
    ],
)
def test_flags_of_the_user_stay_and_ours_are_known_to_xla(own: str, then: str) -> None:
    environ = os.environ | {'XLA_FLAGS': own}
    done = subprocess.run(
        [sys.executable, '-c', SHOW],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip() == then


def test_a_flag_that_xla_does_not_know_is_named(folder: Path) -> None:
    code, said = finish(start(folder, XLA_FLAGS='--xla_no_such_flag=1'))
    assert code != 0
    assert 'Unknown flag in XLA_FLAGS: --xla_no_such_flag=1' in said


@pytest.mark.skipif(
    subprocess.run(['unshare', '--uts', 'true'], check=False, capture_output=True).returncode != 0,
    reason='naming a host needs root, with the right to a namespace of its own',
)
def test_a_host_whose_name_has_no_address_is_named_before_jax_starts(folder: Path) -> None:
    named = 'hostname nowhere.invalid && exec "$@"'
    launch = [sys.executable, '-m', 'megajax', 'launch', '--processes', '2', '--']
    done = subprocess.run(
        ['unshare', '--uts', 'sh', '-c', named, '-', *launch, 'train', 'small.yaml', 'run.dir=run'],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert 'error: the name of this host, nowhere.invalid, has no address' in done.stderr
    assert 'add the line "127.0.1.1 nowhere.invalid" to /etc/hosts' in done.stderr
    assert not (folder / 'run').exists()


@pytest.mark.skipif(
    any('cuda' in plugin.name for plugin in entry_points(group='jax_plugins')),
    reason='jax has a plugin for GPUs here',
)
@pytest.mark.parametrize(
    ('environ', 'message'),
    [
        ({'JAX_PLATFORMS': 'cuda'}, 'error: JAX_PLATFORMS=cuda, and jax has no such devices'),
        (
            {'JAX_PLATFORMS': '', 'CUDA_VISIBLE_DEVICES': '0,1'},
            'error: 2 GPUs are visible, and jax would leave them idle and use the CPU',
        ),
    ],
)
def test_where_gpus_are_meant_a_run_does_not_take_the_cpu(
    folder: Path, environ: dict[str, str], message: str
) -> None:
    code, said = finish(start(folder, **environ))
    assert (code, message in said) == (2, True), said
    assert 'set JAX_PLATFORMS=cpu to train on' in said
    assert not (folder / 'run').exists()


@pytest.mark.parametrize(('hangs', 'processes'), [('mesh_for', 1), ('opened_folder', 2)])
def test_a_start_that_hangs_tells_where_and_ends(folder: Path, hangs: str, processes: int) -> None:
    fault = HANG.format(name=hangs, last=processes - 1)
    code, said = finish(start(folder, processes=processes, fault=fault), timeout=60)
    assert code == STALLED, said
    assert f'process 0 of {processes} (pid ' in said
    assert "has been in phase 'starting' for 2 s and ends at 4 s" in said
    assert 'in hang' in said
    assert 'cannot be written' not in said
