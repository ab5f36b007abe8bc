"""The launcher that started this process, found by the variables that it sets. Imports no jax."""

import re
from collections.abc import Mapping
from typing import NamedTuple

TORCHRUN = 'TORCHELASTIC_RUN_ID'  # a variable that only torchrun sets
SLURM_SIZE, SLURM_NODES = 'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_NODELIST'


class Launcher(NamedTuple):
    """The variables in which a launcher numbers the processes that it starts."""

    name: str
    rank: str
    size: str | None  # None: the launcher does not set the number of processes
    # Pairs of variables for the index and the number of the processes on this host. A launcher sets
    # one pair, or none.
    local: tuple[tuple[str, str], ...] = ()


class Place(NamedTuple):
    """The place of a process among the processes that its launcher started."""

    launcher: Launcher
    address: str | None = None  # host:port of process 0; None: the launcher does not set it
    local: tuple[int, int] | None = None  # index and number of the processes on this host
    on_node: int = 0  # number of GPUs of this host, 0 if unknown


TORCH = Launcher('torchrun', 'RANK', 'WORLD_SIZE', (('LOCAL_RANK', 'LOCAL_WORLD_SIZE'),))
SLURM = Launcher('srun', 'SLURM_PROCID', SLURM_SIZE)
OPEN_MPI = Launcher(
    'mpirun of Open MPI',
    'OMPI_COMM_WORLD_RANK',
    'OMPI_COMM_WORLD_SIZE',
    (('OMPI_COMM_WORLD_LOCAL_RANK', 'OMPI_COMM_WORLD_LOCAL_SIZE'),),
)
# If launcher A also sets the variables of launcher B, A comes before B.
OTHERS = (
    Launcher(
        'MVAPICH',
        'MV2_COMM_WORLD_RANK',
        'MV2_COMM_WORLD_SIZE',
        (('MV2_COMM_WORLD_LOCAL_RANK', 'MV2_COMM_WORLD_LOCAL_SIZE'),),
    ),
    Launcher(
        'mpirun of MPICH or Intel MPI',
        'PMI_RANK',
        'PMI_SIZE',
        (('MPI_LOCALRANKID', 'MPI_LOCALNRANKS'), ('PMI_LOCAL_RANK', 'PMI_LOCAL_SIZE')),
    ),
    Launcher('Flux', 'FLUX_TASK_RANK', 'FLUX_JOB_SIZE'),
    # Without jsrun's local rank: each of its resource sets has GPUs of its own.
    Launcher('jsrun', 'JSM_NAMESPACE_RANK', 'JSM_NAMESPACE_SIZE'),
    Launcher('PALS', 'PALS_RANKID', None, (('PALS_LOCAL_RANKID', 'PALS_LOCAL_SIZE'),)),
    Launcher('ALPS', 'ALPS_APP_PE', None),
    Launcher('PMIx', 'PMIX_RANK', None),
)


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Return this process's place as its launcher sets it, or None if no launcher started it.

    Launchers start one another: the daemons of an mpirun are tasks of a Slurm step, and srun sets
    PMI's variables for its own tasks. The innermost launcher decides. RANK and WORLD_SIZE count
    only if both are set and Slurm does not number the process, because users also export them by
    hand.
    """
    if TORCHRUN in environ and _numbers(TORCH, environ):
        return _torch(environ)
    if _numbers(OPEN_MPI, environ):
        return _open_mpi(environ)
    # Only srun sets the STEP variables, so an sbatch script or a shell in an allocation of many
    # tasks is not mistaken for one of the tasks.
    in_slurm = SLURM_SIZE in environ and SLURM_NODES in environ
    found = next((each for each in OTHERS if _numbers(each, environ)), None)
    if found and not (in_slurm and _is_of_slurm(found, environ)):
        return Place(found, local=_local(found, environ))
    if in_slurm:
        return _slurm(environ)
    return _torch(environ) if _numbers(TORCH, environ) else None


def _numbers(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    return all(name in environ for name in (launcher.rank, launcher.size) if name)


def _is_of_slurm(found: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether srun has set this launcher's variables for its own task."""
    if found.size is None:
        return environ.get('PMIX_NAMESPACE', 'slurm.').startswith('slurm.')
    same_index = environ[found.rank] == environ.get(SLURM.rank)
    return same_index and environ[found.size] == environ[SLURM_SIZE]


def _local(launcher: Launcher, environ: Mapping[str, str]) -> tuple[int, int] | None:
    for index, count in launcher.local:
        place, total = environ.get(index, ''), environ.get(count, '')
        if place.isdecimal() and total.isdecimal():
            return int(place), max(int(total), 1)
    return None


def _torch(environ: Mapping[str, str]) -> Place:
    host, port = environ.get('MASTER_ADDR'), environ.get('MASTER_PORT', '')
    if not host or not port.isdecimal():
        return Place(TORCH, local=_local(TORCH, environ))
    if environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True':  # torchrun listens on that port
        port = str(_port(int(port) + 1))
    host = f'[{host}]' if ':' in host else host
    return Place(TORCH, f'{host}:{port}', _local(TORCH, environ))


def _open_mpi(environ: Mapping[str, str]) -> Place:
    # mpirun's own address, which Open MPI exports up to version 4. Process 0 runs on mpirun's host,
    # unless mpirun starts processes on other hosts only; then it cannot listen there.
    uri = re.match(r'(\d+)\..*tcp://([^,:]+)', environ.get('OMPI_MCA_orte_hnp_uri', ''))
    address = f'{uri[2]}:{_port(int(uri[1]) // 4096)}' if uri else None
    return Place(OPEN_MPI, address, _local(OPEN_MPI, environ))


def _slurm(environ: Mapping[str, str]) -> Place:
    # Steps of one job may share a node, so each step has its own port.
    job, step = (environ.get(name, '0') for name in ('SLURM_JOB_ID', 'SLURM_STEP_ID'))
    port = _port(int(job) + 97 * int(step))
    per_node = _tasks_per_node(environ.get('SLURM_STEP_TASKS_PER_NODE', '1'))
    node = int(environ.get('SLURM_NODEID', 0)) % len(per_node)
    return Place(
        SLURM,
        f'{first_node(environ[SLURM_NODES])}:{port}',
        (int(environ.get('SLURM_LOCALID', 0)), per_node[node]),
        int(environ.get('SLURM_GPUS_ON_NODE', 0)),
    )


def first_node(nodes: str) -> str:
    """Return the first name to which `scontrol show hostnames` expands a list of nodes.

    For example, the first name in `rack[0-1]_blade[08-09,12]-ib,other` is rack0_blade08-ib.
    """
    first = re.match(r'(?:[^,\[]|\[[^\]]*\])*', nodes)
    return re.sub(r'\[([^-,\]]*)[^\]]*\]', r'\1', first[0] if first else nodes)


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's '4(x2),1' to [4, 4, 1]."""
    parts = re.findall(r'(\d+)(?:\(x(\d+)\))?', text)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))] or [1]


def _port(number: int) -> int:
    """Return a port above Linux's default range of client ports."""
    return 61440 + number % 4096
