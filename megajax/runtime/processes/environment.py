"""The index and the number of a run's processes, read from the environment. Imports no jax.

`megajax launch`, a launcher (`launchers.py`) or a user sets the variables. A user or a Kubernetes
manifest sets MEGAJAX_COORDINATOR to host:port of process 0, MEGAJAX_PROCESSES to the number of
processes, and MEGAJAX_PROCESS to the index of each process. Under Slurm, torchrun and Open MPI 4,
no variable needs to be set; other launchers do not set the address of process 0.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from megajax.base.errors import ConfigError
from megajax.core.hardware.visible import has_cuda_plugin, visible_gpus, visible_uuids
from megajax.runtime.processes.launchers import OPEN_MPI, TORCH, Place, find_place

COORDINATOR, PROCESSES, PROCESS = 'MEGAJAX_COORDINATOR', 'MEGAJAX_PROCESSES', 'MEGAJAX_PROCESS'
BIND, START_TIMEOUT = 'MEGAJAX_BIND', 'MEGAJAX_START_TIMEOUT'
LOOPBACK = '127.0.0.1'  # the address of process 0 if `launch` starts the processes of one host
TOKEN = 'MEGAJAX_TOKEN'
MIN_TOKEN_CHARACTERS = 16  # a shorter token could be guessed from an overheard proof
LOCAL_DEVICES = 'JAX_LOCAL_DEVICE_IDS'  # jax's own variable
# variable by which Kubernetes numbers the pods of an Indexed Job
POD_INDEX = 'JOB_COMPLETION_INDEX'


@dataclass(frozen=True, kw_only=True)
class Start:
    """One process of a run: its index, the number of processes, and the address of process 0."""

    index: int
    count: int
    host: str  # host of process 0
    port: int
    bind: str | None  # the address that process 0 listens on; None: all of its interfaces
    timeout: float  # seconds until all processes must have connected
    # Indices among the visible GPUs; None: all of them, or the GPUs in JAX_LOCAL_DEVICE_IDS.
    gpus: tuple[int, ...] | None = None
    token: str | None = field(default=None, repr=False)  # the secret of the run's processes

    @property
    def address(self) -> str:
        """The address of process 0, as host:port."""
        return f'{self.host}:{self.port}'

    def unlisted_gpus(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return the UUIDs of the GPUs of a process that uses all that it sees.

        Returns '' if they are unknown, or if the process has a list of GPUs or uses none, for
        example because jax's plugin for GPUs is not installed.
        """
        is_listed = self.gpus is not None or LOCAL_DEVICES in environ
        return '' if is_listed or not has_cuda_plugin() else ','.join(visible_uuids(environ))


def check_host_name() -> None:
    """Raise ConfigError if the name of this host does not resolve to an address.

    Gloo, which reduces between processes on CPUs, resolves the name, and jax starts Gloo on GPUs,
    too.
    """
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror as error:
        raise ConfigError(
            f'the name of this host, {name}, has no address, so the processes of a run cannot '
            f'reach each other ({error.strerror}): add the line "127.0.1.1 {name}" to /etc/hosts, '
            'with the address that other hosts reach if there are any'
        ) from error


def read_start(environ: Mapping[str, str] = os.environ) -> Start | None:
    """Read this process's place in the run from the environment.

    Returns None if it is the only process, such as the only task of a Slurm or Open MPI job. Raises
    ConfigError for a variable that is missing or invalid, and if a launcher started several
    processes but did not set enough variables to make one run of them.
    """
    if PROCESSES in environ:
        return _by_hand(environ)
    if PROCESS in environ:
        raise ConfigError(
            f'{PROCESS}={environ[PROCESS]} without {PROCESSES}: '
            f'set {COORDINATOR} and {PROCESSES} too, or none of the three'
        )
    place = find_place(environ)
    return _launched(environ, place) if place else None


def _by_hand(environ: Mapping[str, str]) -> Start | None:
    if environ[PROCESSES].strip() == '1':
        return None
    place = find_place(environ)
    given = [PROCESS, POD_INDEX, *([place.launcher.rank] if place else [])]
    index = next((name for name in given if name in environ), PROCESS)
    if missing := [name for name in (COORDINATOR, index) if name not in environ]:
        raise ConfigError(
            f'{PROCESSES}={environ[PROCESSES]} without {" and ".join(missing)}: '
            'set all three, or none'
        )
    local = place.local if place and index == place.launcher.rank else None
    gpus = _share(environ, *local, place.on_node) if place and local else None
    return _start(environ, index, PROCESSES, environ[COORDINATOR], gpus)


def _launched(environ: Mapping[str, str], place: Place) -> Start | None:
    name, index, count, _ = place.launcher
    if count is None:
        raise ConfigError(
            f'{index}={environ[index]}: {name} started this process and does not say how many '
            f'there are: export {PROCESSES}=COUNT, and {COORDINATOR}=HOST:PORT with the host of '
            f'process 0 and a free port, for all of them; {PROCESSES}=1 if there is only this one'
        )
    if _whole(environ, count) == 1:
        return None
    address = environ.get(COORDINATOR, place.address)
    if address is None:
        raise ConfigError(
            f'{index}={environ[index]}, {count}={environ[count]}: {name} does not say where '
            f'process 0 runs: {_how_to_say(name)}, with the host of process 0 and a free port; '
            f'unset {index} and {count} if this process is not one of several'
        )
    gpus = _share(environ, *place.local, place.on_node) if place.local else None
    return _start(environ, index, count, address, gpus)


def _how_to_say(launcher: str) -> str:
    if launcher == OPEN_MPI.name:
        return f'use mpirun -x {COORDINATOR}=HOST:PORT'
    if launcher == TORCH.name:
        return 'set MASTER_ADDR and MASTER_PORT'
    return f'export {COORDINATOR}=HOST:PORT before you start them'


def _start(
    environ: Mapping[str, str],
    index: str,
    count: str,
    address: str,
    gpus: tuple[int, ...] | None = None,
) -> Start | None:
    number, total = _whole(environ, index), _whole(environ, count)
    if not 0 <= number < total:
        raise ConfigError(
            f'{index}={number} is not among the {total} processes of {count}: use 0 to {total - 1}'
        )
    host, _, port = address.rpartition(':')
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            f'{COORDINATOR}={address}: not of the form host:port, for example node1:8476'
        )
    if total == 1:
        return None
    timeout = _whole(environ, START_TIMEOUT, 300)
    host = host.strip('[]')
    return Start(
        index=number,
        count=total,
        host=host,
        port=int(port),
        bind=_bind(environ, host, number),
        timeout=timeout,
        gpus=gpus,
        token=_token(environ),
    )


def _token(environ: Mapping[str, str]) -> str | None:
    if TOKEN not in environ:
        return None
    token = environ[TOKEN].strip()  # if it was read from a file, it may end with a newline
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f'{TOKEN} has {len(token)} characters, and needs at least {MIN_TOKEN_CHARACTERS}: '
            f'export {TOKEN}="$(openssl rand -hex 32)" once, for all processes'
        )
    return token


def _bind(environ: Mapping[str, str], host: str, index: int) -> str | None:
    if given := environ.get(BIND):
        return given
    if host == 'localhost':
        return LOOPBACK
    with suppress(ValueError):
        return str(ip_address(host))
    return _interface_of(host) if index == 0 else None


def _interface_of(name: str) -> str | None:
    """Return the address of this host that `name` resolves to, IPv4 rather than IPv6.

    Returns None for a loopback address, which other hosts cannot reach although a host may resolve
    its own name to it. Also returns None for an address that leads here through a proxy or address
    translation.
    """
    with suppress(OSError):
        for family, *_, socket_address in sorted(socket.getaddrinfo(name, None)):
            address = str(socket_address[0])
            if not ip_address(address).is_loopback and _is_here(family, address):
                return address
    return None


def _is_here(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _share(
    environ: Mapping[str, str], local: int, num_local: int, on_node: int
) -> tuple[int, ...] | None:
    """Return the visible GPUs of task `local` of the `num_local` tasks on this node.

    `on_node` is the number of the node's GPUs, or 0 if unknown. Returns None if jax needs no list,
    because the task may use all GPUs that it sees or the user has listed them.
    """
    visible = visible_gpus(environ)
    bound_already = visible < on_node  # the scheduler has shown each task only its own GPUs
    if LOCAL_DEVICES in environ or visible == 0 or bound_already or (visible == 1 and not on_node):
        return None
    each, left = divmod(visible, num_local)
    if left or not each:
        raise ConfigError(
            f'{num_local} tasks on this node do not divide its {visible} GPUs: '
            'start one task for each GPU or one for all, '
            f'or list the GPUs of each in {LOCAL_DEVICES}'
        )
    return tuple(range(local * each, (local + 1) * each))


def _whole(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f'{name}={text}: not a whole number')
    return int(text)
