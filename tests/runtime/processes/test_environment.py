"""Who starts a process tells it its place in a run, each in his own words."""

import os
import re
import socket
import subprocess
import tomllib
from ipaddress import ip_address
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megajax import load
from megajax.core.config import ConfigError
from megajax.core.hardware import visible
from megajax.core.hardware.visible import visible_gpus
from megajax.runtime.processes import environment
from megajax.runtime.processes.environment import read_start

READ_ONLY = Path('/sys/kernel/uevent_seqnum')
SCRIPTS = Path(__file__).parents[3] / 'scripts'
HAND = {'MEGAJAX_COORDINATOR': 'node1:8476', 'MEGAJAX_PROCESSES': '4', 'MEGAJAX_PROCESS': '3'}
SLURM = {
    'SLURM_JOB_ID': '5000',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': 'gpu[003-004,9],other',
    'SLURM_STEP_NUM_TASKS': '16',
    'SLURM_STEP_TASKS_PER_NODE': '8(x2)',
    'SLURM_PROCID': '11',
    'SLURM_NODEID': '1',
    'SLURM_LOCALID': '3',
    'SLURM_GPUS_ON_NODE': '8',
    'CUDA_VISIBLE_DEVICES': '0,1,2,3,4,5,6,7',
}
OPEN_MPI = {
    'OMPI_COMM_WORLD_SIZE': '2',
    'OMPI_COMM_WORLD_RANK': '1',
    'OMPI_COMM_WORLD_LOCAL_SIZE': '2',
    'OMPI_COMM_WORLD_LOCAL_RANK': '1',
    'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
    'CUDA_VISIBLE_DEVICES': '0,1,2,3',
}


@pytest.mark.parametrize(
    'environ',
    [
        {},
        HAND | {'MEGAJAX_PROCESSES': '1', 'MEGAJAX_PROCESS': '0'},
        SLURM | {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0'},
        {'SLURM_JOB_ID': '5000', 'SLURM_NTASKS': '16', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'},
        OPEN_MPI | {'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'},
        {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '1'},
    ],
    ids=[
        'nothing',
        'one by hand',
        'one task',
        'sbatch without srun',
        'one of mpirun',
        'a pod of a sweep',
    ],
)
def test_a_process_that_is_alone_starts_nothing(environ):
    assert read_start(environ) is None


@pytest.mark.parametrize(
    ('environ', 'index', 'count', 'address', 'bind', 'gpus'),
    [
        (HAND, 3, 4, 'node1:8476', None, None),
        (HAND | {'MEGAJAX_COORDINATOR': '127.0.0.1:81'}, 3, 4, '127.0.0.1:81', '127.0.0.1', None),
        (HAND | {'MEGAJAX_COORDINATOR': '10.0.0.1:81', 'MEGAJAX_BIND': '0.0.0.0'},
         3, 4, '10.0.0.1:81', '0.0.0.0', None),
        (HAND | SLURM, 3, 4, 'node1:8476', None, None),
        (SLURM, 11, 16, 'gpu003:62344', None, (3,)),
        (SLURM | {'SLURM_STEP_NODELIST': 'a-1,b'}, 11, 16, 'a-1:62344', None, (3,)),
        (SLURM | {'MEGAJAX_COORDINATOR': 'ib0:8476'}, 11, 16, 'ib0:8476', None, (3,)),
        (SLURM | {'CUDA_VISIBLE_DEVICES': '0'}, 11, 16, 'gpu003:62344', None, None),
        (SLURM | {'JAX_PLATFORMS': 'cpu'}, 11, 16, 'gpu003:62344', None, None),
        (SLURM | {'SLURM_STEP_TASKS_PER_NODE': '2,1', 'SLURM_LOCALID': '0'},
         11, 16, 'gpu003:62344', None, tuple(range(8))),
        (OPEN_MPI, 1, 2, '10.96.0.1:62624', '10.96.0.1', (2, 3)),
        (OPEN_MPI | {'JAX_LOCAL_DEVICE_IDS': '3'}, 1, 2, '10.96.0.1:62624', '10.96.0.1', None),
    ],
    ids=['hand', 'loopback', 'interface', 'hand over Slurm', 'task per GPU', 'plain names',
         'other network', 'bound', 'cpu', 'per node', 'mpirun', 'ids given'],
)  # fmt: skip
def test_a_process_of_many_knows_its_place_and_its_gpus(environ, index, count, address, bind, gpus):
    start = read_start(environ)
    assert (start.index, start.count, start.address, start.bind, start.gpus) == (
        index,
        count,
        address,
        bind,
        gpus,
    )


@pytest.mark.parametrize(
    ('environ', 'message'),
    [
        (
            {'MEGAJAX_PROCESSES': '4'},
            'MEGAJAX_PROCESSES=4 without MEGAJAX_COORDINATOR and MEGAJAX_PROCESS',
        ),
        ({'MEGAJAX_PROCESS': '1'}, 'MEGAJAX_PROCESS=1 without MEGAJAX_PROCESSES'),
        (
            HAND | {'MEGAJAX_PROCESS': '4'},
            'MEGAJAX_PROCESS=4 is not among the 4 processes of MEGAJAX_PROCESSES: use 0 to 3',
        ),
        (HAND | {'MEGAJAX_PROCESS': 'x'}, 'MEGAJAX_PROCESS=x: not a whole number'),
        (
            HAND | {'MEGAJAX_COORDINATOR': 'node1'},
            'MEGAJAX_COORDINATOR=node1: not of the form host:port',
        ),
        (
            SLURM | {'SLURM_STEP_TASKS_PER_NODE': '3'},
            '3 tasks on this node do not divide its 8 GPUs',
        ),
        (OPEN_MPI | {'OMPI_MCA_orte_hnp_uri': ''}, 'mpirun -x MEGAJAX_COORDINATOR=HOST:PORT'),
    ],
    ids=[
        'two missing',
        'index alone',
        'index too large',
        'no number',
        'no port',
        'indivisible GPUs',
        'Open MPI 5',
    ],
)
def test_an_environment_that_cannot_be_is_refused_with_the_fix(environ, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_start(environ)


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))  # sends nothing
        except OSError:
            pytest.skip('this host has loopback alone')
        return probe.getsockname()[0]


@pytest.mark.parametrize('index', ['0', '1'])
@pytest.mark.parametrize('where', ['here', 'loopback', 'elsewhere', 'nowhere'])
def test_process_0_listens_on_the_interface_that_its_name_resolves_to(where, index):
    # A number in decimal is a name that resolves without a name server.
    here = own_address()
    name = {
        'here': f'{int(ip_address(here))}',
        'loopback': f'{int(ip_address("127.0.0.1"))}',
        'elsewhere': f'{int(ip_address("192.0.2.1"))}',
        'nowhere': 'nowhere.invalid',
    }[where]
    start = read_start(HAND | {'MEGAJAX_COORDINATOR': f'{name}:81', 'MEGAJAX_PROCESS': index})
    assert start.bind == (here if (where, index) == ('here', '0') else None)


def test_the_guide_names_every_variable_that_is_set_by_hand():
    page = (SCRIPTS.parent / 'docs/hosts.md').read_text()
    section = page.partition('### Set rank and world size yourself')[2].partition('\n#')[0]
    named = re.findall(r'^\| `(\w+)` \|', section, flags=re.MULTILINE)
    assert named == [
        *(environment.COORDINATOR, environment.PROCESSES, environment.PROCESS),
        *(environment.LOCAL_DEVICES, environment.TOKEN),
        *(environment.BIND, environment.START_TIMEOUT),
    ]


def test_processes_that_are_numbered_by_hand_use_all_visible_gpus_unless_theirs_are_named():
    gpus = {'CUDA_VISIBLE_DEVICES': '4,5,6,7'}
    assert read_start(HAND | gpus).gpus is None
    assert read_start(HAND | gpus | {'JAX_LOCAL_DEVICE_IDS': '1'}).gpus is None


@pytest.mark.parametrize('given', ['0123456789abcdef', ' 0123456789abcdef\n'])
def test_the_token_is_read_and_not_shown(given):
    start = read_start(HAND | {'MEGAJAX_TOKEN': given})
    assert start.token == '0123456789abcdef'
    assert '0123456789abcdef' not in repr(start)


@pytest.mark.parametrize('given', ['', '\n', 'secret-so-short'])
def test_a_token_that_could_be_guessed_is_refused_and_not_shown(given):
    with pytest.raises(
        ConfigError, match=r'MEGAJAX_TOKEN has \d+ characters.*openssl rand'
    ) as error:
        read_start(HAND | {'MEGAJAX_TOKEN': given})
    assert 'secret' not in str(error.value)


def test_steps_of_one_slurm_job_meet_at_different_ports():
    assert len({read_start(SLURM | {'SLURM_STEP_ID': f'{step}'}).port for step in range(40)}) == 40


@pytest.mark.parametrize(
    ('environ', 'count'),
    [
        ({'CUDA_VISIBLE_DEVICES': '4,5'}, 2),
        ({'CUDA_VISIBLE_DEVICES': ' GPU-5ebe9f43, MIG-GPU-5ebe9f43/1/0'}, 2),
        ({'CUDA_VISIBLE_DEVICES': '0,-1,1'}, 1),
        ({'CUDA_VISIBLE_DEVICES': 'NoDevFiles'}, 0),
        ({'CUDA_VISIBLE_DEVICES': ''}, 0),
        ({'CUDA_VISIBLE_DEVICES': '0', 'JAX_PLATFORMS': 'cpu'}, 0),
    ],
)
def test_gpus_are_those_that_cuda_shows(environ, count):
    assert visible_gpus(environ) == count


@pytest.mark.parametrize(
    ('script', 'count'),
    [
        ('echo "GPU 0: H100 (UUID: GPU-1)"; echo "GPU 1: H100 (UUID: GPU-2)"', 2),
        ('echo "NVIDIA-SMI has failed"; exit 9', 0),
    ],
    ids=['two', 'no driver'],
)
def test_without_a_choice_gpus_are_those_that_nvidia_smi_lists(
    script, count, tmp_path, monkeypatch
):
    make_nvidia_smi(tmp_path, script, monkeypatch)
    monkeypatch.setattr(visible, 'DEVICES', tmp_path)
    assert visible_gpus({}) == count


def make_nvidia_smi(folder, script, monkeypatch):
    command = folder / 'nvidia-smi'
    command.write_text(f'#!/bin/sh\n{script}\n')
    command.chmod(0o755)
    monkeypatch.setenv('PATH', str(folder), prepend=os.pathsep)


@pytest.mark.parametrize('script', ['exit 9', None], ids=['fails', 'missing'])
def test_gpus_that_nvidia_smi_cannot_list_are_those_with_a_device_file(
    script, tmp_path, monkeypatch
):
    if script:
        make_nvidia_smi(tmp_path, script, monkeypatch)
    else:
        monkeypatch.setenv('PATH', str(tmp_path))
    for name in ('nvidia0', 'nvidia11', 'nvidiactl', 'nvidia-uvm', 'nvidia-caps'):
        (tmp_path / name).touch()
    monkeypatch.setattr(visible, 'DEVICES', tmp_path)
    assert visible_gpus({}) == 2
    assert visible_gpus({'CUDA_VISIBLE_DEVICES': '0'}) == 1
    assert visible_gpus({'JAX_PLATFORMS': 'cpu'}) == 0


@pytest.mark.skipif(not READ_ONLY.exists(), reason='needs a file that not even root may write')
def test_a_gpu_of_another_job_does_not_count(tmp_path, monkeypatch):
    make_nvidia_smi(tmp_path, 'echo "No devices were found"; exit 6', monkeypatch)
    (tmp_path / 'nvidia0').symlink_to(READ_ONLY)
    (tmp_path / 'nvidia1').touch()
    monkeypatch.setattr(visible, 'DEVICES', tmp_path)
    assert visible_gpus({}) == 1


def test_the_slurm_example_makes_a_token_that_is_on_no_command_line():
    script = (SCRIPTS / 'slurm.sbatch').read_text()
    (line,) = re.findall('^export MEGAJAX_TOKEN.*$', script, flags=re.MULTILINE)
    shell = f'{line}\nprintenv MEGAJAX_TOKEN'
    first, second = (
        subprocess.run(['bash', '-c', shell], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert re.fullmatch(r'[0-9a-f]{64}\n', first)
    assert first != second
    assert 'TOKEN' not in script.replace(line, '')


def test_the_slurm_example_has_a_mesh_for_its_tasks():
    script = (SCRIPTS / 'slurm.sbatch').read_text()
    sizes = {
        name: int(value)
        for name, value in re.findall(r'--(nodes|ntasks-per-node|gpus-per-node)=(\d+)', script)
    }
    command = re.search(r'slurm.sbatch (\S+) (mesh\S+) (mesh\S+)', script)
    config = load(command[1], [command[2], command[3]])
    assert (
        config.mesh.data * config.mesh.model
        == sizes['nodes'] * sizes['ntasks-per-node']
        == sizes['nodes'] * sizes['gpus-per-node']
    )


def test_the_slurm_example_asks_for_the_memory_of_its_hosts():
    options = (SCRIPTS / 'slurm.sbatch').read_text().splitlines()
    assert {'#SBATCH --mem=0', '#SBATCH --exclusive'} <= set(options)


def test_the_image_has_pinned_versions_that_the_package_allows():
    project = tomllib.loads((SCRIPTS.parent / 'pyproject.toml').read_text())['project']
    lines = (SCRIPTS / 'constraints.txt').read_text().splitlines()
    pinned = dict(line.split('==') for line in lines if not line.startswith('#'))
    extras = project['optional-dependencies']
    images = [*project['dependencies'], *extras['cuda'], *extras['cuda13'], *extras['chat']]
    for requirement in map(Requirement, images):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)
    dockerfile = (SCRIPTS.parent / 'Dockerfile').read_text()
    assert re.search(r'^ARG BASE=python:3\.\d+\.\d+-', dockerfile, re.MULTILINE)
    assert dockerfile.count('--constraint ') == dockerfile.count('pip install --no-cache-dir')
