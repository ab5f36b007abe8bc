"""Warn if tensor or expert parallelism spans GPUs that have no NVLink between them."""

import math
import os
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from megajax.core.config.divisors import divisors
from megajax.core.hardware.targets import is_nvidia
from megajax.core.hardware.topology import Topology, topology_of_host
from megajax.core.parallel.hosts import Hosts, nvlink_domain
from megajax.core.parallel.layout import EXPERT
from megajax.core.parallel.mesh import host_names
from megajax.runtime.run.log.report import Report

TENSOR = ('row', 'model')  # the mesh axes for whose collectives every layer waits


def note_links(mesh: Mesh, report: Report) -> None:
    """Print a note if tensor parallelism joins GPUs of this host over PCIe, or experts span hosts.

    All processes must call this.
    """
    is_tensor = mesh.shape['model'] * mesh.shape.get('row', 1) > 1
    if is_tensor and is_nvidia(mesh.devices.flat[0]):
        gpus, topology = gpus_of_host(mesh), topology_of_host()
        if topology and (note := slow_links(mesh, topology, gpus)):
            report.say(f'note       {note}')
    if mesh.shape.get(EXPERT, 1) > 1:
        names = host_names()
        places = [names[device.process_index] for device in mesh.devices.flat]
        domain = nvlink_domain(mesh.devices.flat[0].device_kind)
        if note := experts_across_hosts(Hosts(places, domain), mesh.shape):
            report.say(f'note       {note}')


def experts_across_hosts(hosts: Hosts, sizes: Mapping[str, int]) -> str | None:
    """Return a line if devices that share the experts of a layer are on several hosts, else None.

    Groups that NVLink joins need no line. Devices that share experts are next to each other in the
    mesh, together with their context and tensor-parallel groups.
    """
    axes, experts = list(sizes), sizes[EXPERT]
    group = math.prod(sizes[axis] for axis in axes[axes.index(EXPERT) :])
    if not hosts.span(group):
        return None
    fits = (count for count in divisors(experts) if not hosts.span(group // experts * count))
    most = max(fits, default=1)
    within = ' to stay within NVLink' if hosts.domain else ' to stay within a host'
    advice = f'use mesh.experts={most}' + (within if most > 1 else '')
    return (
        f'mesh.experts={experts} reaches across hosts ({hosts.crossed(group)}), so the all-to-alls '
        f'of each layer wait for their network; {advice}'
    )


def gpus_of_host(mesh: Mesh, environ: Mapping[str, str] = os.environ) -> dict[int, int]:
    """Return nvidia-smi's number of each device of this host, by the id of the device.

    CUDA_VISIBLE_DEVICES may hide some GPUs. All processes must call this.
    """
    visible = _visible(environ)
    numbers = [device.local_hardware_id for device in mesh.local_devices]
    numbers = [visible[number] for number in numbers] if visible else numbers
    own = np.array([[device.id for device in mesh.local_devices], numbers])[None]
    everywhere = own if jax.process_count() == 1 else process_allgather(own, tiled=True)
    hosts = host_names()
    here = everywhere[[host == hosts[jax.process_index()] for host in hosts]]
    if len(np.unique(here[:, 1])) < here[:, 1].size:  # each process numbers the GPUs that it sees
        here = own
    return dict(zip(here[:, 0].ravel().tolist(), here[:, 1].ravel().tolist(), strict=True))


def slow_links(mesh: Mesh, topology: Topology, gpus: Mapping[int, int]) -> str | None:
    """Return a line about the first tensor-parallel group of a host that uses PCIe, or None.

    `gpus` are the numbers of the host's devices (`gpus_of_host`).
    """
    sizes = [mesh.shape[axis] for axis in mesh.axis_names if axis in TENSOR]
    for group in mesh.devices.reshape(-1, int(np.prod(sizes))):
        own = sorted(gpus[device.id] for device in group if device.id in gpus)
        if pairs := topology.over_pcie(own):
            together = max(len(joined) for joined in topology.nvlink_groups)
            return (
                f'model={mesh.shape["model"]} joins GPUs {", ".join(map(str, own))} over '
                f'PCIe ({topology.words(pairs)}); {_advice(together)}'
            )
    return None


def _advice(together: int) -> str:
    if together == 1:
        return 'no GPUs of this host share NVLink: prefer data parallelism (mesh.data, optim.shard)'
    return f'at most {together} GPUs of this host share NVLink: use mesh.model of at most that'


def _visible(environ: Mapping[str, str]) -> list[int] | None:
    """Return nvidia-smi's numbers of the visible GPUs; None if all are visible or have names."""
    chosen = environ.get('CUDA_VISIBLE_DEVICES', '')
    names = [name.strip() for name in chosen.split(',')]
    return [int(name) for name in names] if all(name.isdigit() for name in names) else None
