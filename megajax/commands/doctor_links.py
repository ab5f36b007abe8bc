"""Check NCCL for `megajax doctor`: its release, links, shared memory and variables."""

import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from megajax.commands.diagnosis import Diagnosis
from megajax.core.hardware.topology import Topology, topology_of_host

PACKAGES = 'nvidia-nccl-cu12', 'nvidia-nccl-cu13'
SHARED = Path('/dev/shm')
LITTLE_SHARED = 1e9  # bytes; by default, containers have 64 MB
# Variables that disable a transport, with the value that does so.
FORBID = {
    'NCCL_P2P_DISABLE': ('1', 'NVLink and PCIe between the GPUs of a host'),
    'NCCL_SHM_DISABLE': ('1', 'shared memory between the processes of a host'),
    'NCCL_IB_DISABLE': ('1', 'InfiniBand and RoCE between hosts'),
}


class BadRelease(NamedTuple):
    """NCCL releases from `first` to before `fixed`, which fail on `machine` (on all if empty)."""

    first: tuple[int, ...]
    fixed: tuple[int, ...]
    machine: str
    what: str


BAD = (
    # pytorch/pytorch#174338
    BadRelease((2, 29, 2), (2, 29, 3), '', 'may hang (a regression, fixed in 2.29.3)'),
    # marin-community/marin#8038 and the notes of 2.29.3
    BadRelease((0,), (2, 29, 3), 'aarch64', 'can run out of proxy slots on ARM and hang'),
)


def look_at_nccl(diagnosis: Diagnosis, gpus: int, environ: Mapping[str, str] = os.environ) -> None:
    """Add NCCL's release and variables and, on GPUs, the links and shared memory it needs."""
    for name in PACKAGES:
        try:
            _release(diagnosis, version(name), platform.machine())
        except PackageNotFoundError:
            continue
    if gpus:
        _links(diagnosis, topology_of_host())
        _shared_memory(diagnosis, shutil.disk_usage(SHARED).total if SHARED.is_dir() else 0)
    _variables(diagnosis, environ)


def _release(diagnosis: Diagnosis, release: str, machine: str) -> None:
    diagnosis.fact('nccl', release)
    number = tuple(int(part) for part in release.split('.') if part.isdigit())
    for bad in BAD:
        if bad.first <= number < bad.fixed and bad.machine in ('', machine):
            fixed = '.'.join(map(str, bad.fixed))
            diagnosis.wrong(
                f'NCCL {release} {bad.what}', f'install the package of NCCL {fixed} or later'
            )


def _links(diagnosis: Diagnosis, topology: Topology | None) -> None:
    if topology is None:
        diagnosis.fact('links', 'unknown: nvidia-smi topo -m does not list them')
        return
    groups = topology.nvlink_groups
    shared = [', '.join(map(str, group)) for group in groups if len(group) > 1]
    between = topology.over_pcie(range(len(topology.links)))
    ways = [f'GPUs {group} are connected by NVLink' for group in shared]
    if between:
        who = 'the rest communicate' if shared else 'all communicate'
        ways.append(f'{who} over PCIe ({topology.words(between)})')
    diagnosis.fact('links', '; '.join(ways) or 'one GPU')


def _shared_memory(diagnosis: Diagnosis, size: float) -> None:
    diagnosis.fact('shared memory', f'{size / 1e9:.1f} GB in {SHARED}')
    if size < LITTLE_SHARED:
        diagnosis.wrong(
            f'{SHARED} has {size / 1e6:.0f} MB, in which processes on this host exchange data',
            'docker run --shm-size=16g (or --ipc=host); in Kubernetes mount an emptyDir with '
            'medium: Memory there, as scripts/kubernetes.yaml does',
        )


def _variables(diagnosis: Diagnosis, environ: Mapping[str, str]) -> None:
    settings = [f'{name}={value}' for name, value in sorted(environ.items()) if name[:5] == 'NCCL_']
    if settings:
        diagnosis.fact('variables', ', '.join(settings))
    for name, (value, way) in FORBID.items():
        if environ.get(name) == value:
            diagnosis.wrong(f'{name}={value} disables {way} for NCCL', f'unset {name}')
