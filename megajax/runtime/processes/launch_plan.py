"""The plan of `megajax launch`: a command, and the variables of each process. Imports no jax."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megajax.base.errors import ConfigError
from megajax.core.config.extras import install
from megajax.core.hardware.cpu_flags import with_collective_limit
from megajax.core.hardware.visible import has_cuda_plugin, visible_gpus
from megajax.runtime.processes.environment import (
    BIND,
    COORDINATOR,
    LOCAL_DEVICES,
    LOOPBACK,
    POD_INDEX,
    PROCESS,
    PROCESSES,
)
from megajax.runtime.processes.launchers import find_place


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The processes to start: one command, and the environment variables to add for each."""

    command: tuple[str, ...]
    variables: tuple[Mapping[str, str], ...]
    hosts: int = 1  # number of hosts, each of which starts this many processes of the run
    first: int = 0  # index of this host's first process in the run

    def __str__(self) -> str:
        settings = (
            shlex.join([f'{name}={value}' for name, value in variables.items()])
            for variables in self.variables
        )
        command = shlex.join(self.command)
        return '\n'.join(
            f'[{index}] {text} {command}' for index, text in enumerate(settings, self.first)
        )


def make_plan(
    arguments: Sequence[str],
    *,
    processes: int,
    needed: int,
    devices_per_process: int | None = None,
    hosts: int = 1,
    host: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> LaunchPlan:
    """Plan `python -m megajax ARGUMENTS` in `processes` processes, for a mesh of `needed` devices.

    Each process gets its own part of the visible GPUs or, without GPUs, simulated CPU devices:
    `devices_per_process` of them, by default an equal share. With several hosts, the plan has the
    processes of host number `host`, or of this pod of an Indexed Job. Raises ConfigError if the
    numbers do not fit, so that no GPU is idle or shared.
    """
    if hosts == 1:
        _check_alone(environ)
    gpus = _usable_gpus(environ)
    devices = devices_per_process or max((gpus or needed // hosts) // processes, 1)
    product = f'{processes} processes x {devices} devices'
    if gpus and processes * devices != gpus:
        raise ConfigError(
            f'{product} are {processes * devices}, but {gpus} GPUs are visible: '
            f'choose --processes and --devices-per-process for {gpus}, '
            f'or list {processes * devices} in CUDA_VISIBLE_DEVICES'
        )
    if hosts * processes * devices != needed:
        raise ConfigError(
            f'{f"{hosts} hosts x " if hosts > 1 else ""}{product} are '
            f'{hosts * processes * devices}, but the mesh of the config (mesh.stages x '
            f'mesh.data x mesh.context x mesh.model_rows x mesh.model) needs {needed}: '
            'change the mesh, or choose --processes and --devices-per-process to match it'
        )
    first = processes * _index_of_host(hosts, host, environ)
    run = {COORDINATOR: _coordinator(hosts, environ), PROCESSES: str(hosts * processes)}
    if hosts == 1:
        run[BIND] = LOOPBACK  # where the coordinator is, whatever this host's variable says
    place = _gpus_of if gpus else _cpus_of
    return LaunchPlan(
        command=(sys.executable, '-m', 'megajax', *arguments),
        variables=tuple(
            {**run, PROCESS: str(first + index), **place(index, devices, environ)}
            for index in range(processes)
        ),
        hosts=hosts,
        first=first,
    )


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise ConfigError if several processes run `launch`, because each would start its own run."""
    if PROCESSES in environ or (place := find_place(environ)) is None:
        return
    name, index, count, _ = place.launcher
    if count and environ[count] != '1':
        raise ConfigError(
            f'{name} started {environ[count]} processes ({count}), of which this is '
            f'{index}={environ[index]}, and each would start a run of its own with launch: '
            f'run megajax train without launch; or start one process, or with --hosts one per host'
        )


def _index_of_host(hosts: int, host: int | None, environ: Mapping[str, str]) -> int:
    given = str(host) if host is not None else environ.get(POD_INDEX) if hosts > 1 else '0'
    if given is None:
        raise ConfigError(
            f'--hosts {hosts} without --host: say which of them this is, from 0; '
            f'in a pod of an Indexed Job it is {POD_INDEX}'
        )
    if not given.isdecimal() or int(given) >= hosts:
        where = '--host ' if host is not None else f'{POD_INDEX}='
        raise ConfigError(
            f'{where}{given} is not among the {hosts} of --hosts: use 0 to {hosts - 1}'
        )
    return int(given)


def _coordinator(hosts: int, environ: Mapping[str, str]) -> str:
    if hosts == 1:
        return f'{LOOPBACK}:{_free_port()}'
    if not environ.get(COORDINATOR):
        raise ConfigError(
            f'--hosts {hosts} without {COORDINATOR}: '
            'export it on each host as HOST:PORT of host 0, for example node1:8476'
        )
    return environ[COORDINATOR]


def _usable_gpus(environ: Mapping[str, str]) -> int:
    gpus = visible_gpus(environ)
    if gpus and not has_cuda_plugin():
        raise ConfigError(
            f'{gpus} GPUs are visible and jax has no plugin for them: '
            f'{install("cuda")}, or set JAX_PLATFORMS=cpu for CPU devices'
        )
    return gpus


def _gpus_of(index: int, devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        LOCAL_DEVICES: ','.join(str(gpu) for gpu in range(index * devices, (index + 1) * devices))
    }


def _cpus_of(index: int, devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        'JAX_PLATFORMS': 'cpu',
        'JAX_NUM_CPU_DEVICES': str(devices),
        'XLA_FLAGS': with_collective_limit(environ.get('XLA_FLAGS', '')),
    }


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        port: int = server.getsockname()[1]
    return port
