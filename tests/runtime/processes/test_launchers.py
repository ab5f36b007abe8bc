"""Processes of a launcher make one run, or an error that names its variables and the fix."""

import re
import sys

import pytest
from typer.testing import CliRunner

from megajax.commands.main import app
from megajax.core.config import ConfigError
from megajax.runtime.processes.environment import read_start
from megajax.runtime.processes.launchers import first_node

SLURM = {
    'SLURM_JOB_ID': '5000',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': 'gpu[1-2]',
    'SLURM_STEP_NUM_TASKS': '2',
    'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
    'SLURM_PROCID': '1',
    'SLURM_NODEID': '1',
    'SLURM_LOCALID': '0',
}
# As `mpirun -n 2 env` of MPICH 4.0 prints them.
MPICH = {'PMI_RANK': '1', 'PMI_SIZE': '2', 'MPI_LOCALRANKID': '1', 'MPI_LOCALNRANKS': '2'}
CRAY_MPICH = {'PMI_RANK': '1', 'PMI_SIZE': '2', 'PMI_LOCAL_RANK': '1', 'PMI_LOCAL_SIZE': '2'}
PALS = {'PALS_RANKID': '1', 'PALS_LOCAL_RANKID': '1', 'PALS_LOCAL_SIZE': '2'}
TORCHRUN = {
    'RANK': '1',
    'WORLD_SIZE': '2',
    'LOCAL_RANK': '1',
    'LOCAL_WORLD_SIZE': '2',
    'MASTER_ADDR': '10.0.0.1',
    'MASTER_PORT': '29500',
    'TORCHELASTIC_RUN_ID': 'x',
    'TORCHELASTIC_USE_AGENT_STORE': 'True',
}
BY_HAND = {name: TORCHRUN[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')}
OPEN_MPI_5 = {
    'OMPI_COMM_WORLD_SIZE': '2',
    'OMPI_COMM_WORLD_RANK': '0',
    'PMIX_NAMESPACE': 'prterun-vm-7@1',
    'PMIX_RANK': '0',
}
PMIX = {'PMIX_NAMESPACE': 'prterun-vm-7@1', 'PMIX_RANK': '0'}
FIRST_OF_HOST = 1, '10.0.0.1:62269', (0, 1, 2, 3)
GPUS = {'CUDA_VISIBLE_DEVICES': '0,1,2,3'}
HERE = {'MEGAJAX_COORDINATOR': '127.0.0.1:81'}


@pytest.mark.parametrize(
    ('nodes', 'first'),
    [
        ('node1', 'node1'),
        ('a-1,b', 'a-1'),
        ('node[001-004,7],other', 'node001'),
        ('gpu[003,009-010]', 'gpu003'),
        ('rack[0-1]_blade[0-1]', 'rack0_blade0'),
        ('rack[00,2]_blade[08-09,12]-ib,other', 'rack00_blade08-ib'),
        ('node[1-2]-ib', 'node1-ib'),
        ('gpu[08-09].a.b', 'gpu08.a.b'),
        ('login,node[1-2]', 'login'),
        ('[1-3]n', '1n'),
    ],
)
def test_process_0_is_on_the_first_node_that_scontrol_show_hostnames_names(nodes, first):
    assert first_node(nodes) == first
    assert read_start(SLURM | {'SLURM_STEP_NODELIST': nodes}).host == first


@pytest.mark.parametrize(
    ('environ', 'index', 'address', 'gpus'),
    [
        (MPICH | HERE, 1, '127.0.0.1:81', None),
        (MPICH | HERE | GPUS, 1, '127.0.0.1:81', (2, 3)),
        (CRAY_MPICH | HERE | GPUS, 1, '127.0.0.1:81', (2, 3)),
        (PALS | HERE | GPUS | {'MEGAJAX_PROCESSES': '2'}, 1, '127.0.0.1:81', (2, 3)),
        (OPEN_MPI_5 | HERE, 0, '127.0.0.1:81', None),
        (PMIX | HERE | {'MEGAJAX_PROCESSES': '2'}, 0, '127.0.0.1:81', None),
        (TORCHRUN, 1, '10.0.0.1:62269', None),
        (TORCHRUN | GPUS, 1, '10.0.0.1:62269', (2, 3)),
        (TORCHRUN | {'MASTER_ADDR': 'fd00::2'}, 1, 'fd00::2:62269', None),
        (TORCHRUN | {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'} | GPUS, *FIRST_OF_HOST),
        (BY_HAND | GPUS, 1, '10.0.0.1:29500', None),
        (SLURM, 1, 'gpu1:62344', None),
        # srun --mpi=pmi2 and --mpi=pmix set variables for their own tasks.
        (SLURM | MPICH, 1, 'gpu1:62344', None),
        (SLURM | {'PMIX_RANK': '1', 'PMIX_NAMESPACE': 'slurm.pmix.5000.0'}, 1, 'gpu1:62344', None),
        # A script that srun's tasks inherit has RANK from its own SLURM_PROCID.
        (SLURM | BY_HAND | {'RANK': '0'}, 1, 'gpu1:62344', None),
        # Daemons of these are tasks of a step.
        (SLURM | MPICH | HERE | {'PMI_SIZE': '4', 'PMI_RANK': '3'}, 3, '127.0.0.1:81', None),
        (SLURM | TORCHRUN | {'RANK': '0'}, 0, '10.0.0.1:62269', None),
        (SLURM | OPEN_MPI_5 | HERE, 0, '127.0.0.1:81', None),
    ],
)
def test_the_processes_of_a_launcher_make_one_run(environ, index, address, gpus):
    start = read_start(environ)
    assert (start.index, start.address, start.gpus) == (index, address, gpus)


@pytest.mark.parametrize(
    'environ',
    [
        TORCHRUN | {'RANK': '0', 'WORLD_SIZE': '1'},
        MPICH | {'PMI_RANK': '0', 'PMI_SIZE': '1'},
        PMIX | {'MEGAJAX_PROCESSES': '1'},
        {'RANK': '3'},
        {'WORLD_SIZE': '8', 'MASTER_ADDR': 'node1', 'MASTER_PORT': '29500'},
        SLURM | {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0', 'RANK': '0', 'WORLD_SIZE': '8'},
    ],
    ids=['torchrun', 'mpirun', 'prun', 'RANK', 'an sbatch script', 'a shell that srun started'],
)
def test_one_process_and_variables_that_were_left_over_start_a_run_of_one(environ):
    assert read_start(environ) is None


@pytest.mark.parametrize(
    ('environ', 'message'),
    [
        (MPICH, 'PMI_RANK=1, PMI_SIZE=2: .* export MEGAJAX_COORDINATOR=HOST:PORT'),
        (OPEN_MPI_5, 'OMPI_COMM_WORLD_SIZE=2: .* use mpirun -x MEGAJAX_COORDINATOR=HOST:PORT'),
        (PMIX, 'PMIX_RANK=0: .* export MEGAJAX_PROCESSES=COUNT, and MEGAJAX_COORDINATOR'),
        (SLURM | PMIX, 'PMIX_RANK=0: .* export MEGAJAX_PROCESSES=COUNT'),
        ({'PALS_RANKID': '0'}, 'PALS_RANKID=0: .* MEGAJAX_PROCESSES=1 if there is only this one'),
        (
            {'MV2_COMM_WORLD_RANK': '0', 'MV2_COMM_WORLD_SIZE': '2'},
            'MV2_COMM_WORLD_SIZE=2: .* export MEGAJAX_COORDINATOR=HOST:PORT',
        ),
        (
            {'RANK': '0', 'WORLD_SIZE': '2'},
            'set MASTER_ADDR and MASTER_PORT.*; unset RANK and WORLD_SIZE if',
        ),
    ],
)
def test_processes_that_would_each_start_a_run_of_their_own_are_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_start(environ)


def test_train_refuses_them_before_jax_is_imported(monkeypatch):
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    # Importing this module imports jax, and fails here.
    monkeypatch.setitem(sys.modules, 'megajax.runtime.processes.distributed', None)
    result = CliRunner().invoke(app, ['train', 'tiny'])
    assert isinstance(result.exception, ConfigError)
    assert 'PMI_RANK=1, PMI_SIZE=2' in str(result.exception)


def test_several_tasks_that_run_launch_are_refused(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    arguments = ['launch', '--processes', '2', '--dry-run', '--', 'train', 'tiny']
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    message = 'srun started 2 processes (SLURM_STEP_NUM_TASKS), of which this is SLURM_PROCID=1'
    assert re.search(re.escape(message), str(result.exception))
