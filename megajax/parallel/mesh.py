"""Meshes of devices: GPUs if the machine has any, otherwise simulated devices on a CPU."""

import collections
import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from megajax.config import Config, ConfigError
from megajax.processes.environment import visible_gpus

# Mesh axes, outermost first; the axis that communicates most, and waits for it, is innermost.
AXES = ('replica', 'stage', 'data', 'context', 'row', 'model')
ALWAYS = ('data', 'model')  # in every mesh, even with one device
HOST_BYTES = 256  # maximum length of a host's name in bytes


def mesh_for(config: Config) -> Mesh:
    """Return the mesh of `config.mesh`, see `make_mesh`."""
    mesh = config.mesh
    return make_mesh(mesh.data, mesh.model, cross_hosts=mesh.allow_model_across_hosts)


def make_mesh(data: int = 1, model: int = 1, *, cross_hosts: bool = False, **axes: int) -> Mesh:
    """Return a mesh with Explicit axes in the order of AXES, `model` innermost.

    A tensor-parallel group therefore consists of neighbors on one host. `axes` are the sizes of
    axes other than `data` and `model`; an axis of size 1 is not in the mesh, and an axis that is
    not in AXES comes after `data`. If the machine has only CPUs and jax has not been used yet, the
    required number of devices is simulated.

    Raises ConfigError if there are too few devices, or if `model` would span hosts and
    `cross_hosts` does not allow it. With several processes, all must call it.
    """
    sizes = axis_sizes(data, model, **axes)
    needed = math.prod(sizes.values())
    _simulate_cpu_devices(needed)
    devices = _devices()
    if len(devices) < needed:
        raise ConfigError(_too_few(sizes, devices))
    if jax.process_count() > 1 and len(devices) != needed:
        raise ConfigError(
            f'{_words(sizes)} leaves {len(devices) - needed} of {len(devices)} devices idle, and '
            f'with {jax.process_count()} processes each must have its part: '
            f'set mesh.data={len(devices) * data // needed}'
        )
    if jax.process_count() > 1:
        devices = _within_hosts(devices, needed // model, model, cross_hosts)
    return mesh_of(devices[:needed], sizes)


def axis_sizes(data: int = 1, model: int = 1, **axes: int) -> dict[str, int]:
    """Return the axes of a mesh and their sizes, outermost first."""
    sizes = axes | {'data': data, 'model': model}
    after_data = AXES.index('data') + 0.5
    order = sorted(sizes, key=lambda axis: AXES.index(axis) if axis in AXES else after_data)
    return {axis: sizes[axis] for axis in order if sizes[axis] > 1 or axis in ALWAYS}


def mesh_of(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of these devices with Explicit axes.

    The devices may be abstract (`hardware/targets.py`).
    """
    grid = np.array(devices).reshape(*sizes.values())
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def _words(sizes: Mapping[str, int]) -> str:
    return ' x '.join(f'mesh.{axis}={size}' for axis, size in sizes.items())


def is_simulated(mesh: Mesh) -> bool:
    """Whether the devices of the mesh share one CPU."""
    return (
        mesh.size > 1
        and all(device.platform == 'cpu' for device in mesh.devices.flat)
        and jax.process_count() == 1
    )


def concrete(abstract: Any) -> Any:
    """Return an abstract tree (`jax.eval_shape`) with its shardings on the current mesh."""
    mesh = jax.sharding.get_mesh()

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = P() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, abstract)


def _within_hosts(
    devices: list[jax.Device], data: int, model: int, cross_hosts: bool
) -> list[jax.Device]:
    """Return the devices with those of a host adjacent, however its processes are numbered.

    Raises ConfigError if a tensor-parallel group would span hosts, unless `cross_hosts`.
    """
    hosts = _hosts()
    devices = sorted(devices, key=lambda device: hosts.index(hosts[device.process_index]))
    groups = [
        {hosts[device.process_index] for device in devices[i * model : (i + 1) * model]}
        for i in range(data)
    ]
    if cross_hosts or all(len(group) == 1 for group in groups):
        return devices
    largest = math.gcd(
        *collections.Counter(hosts[device.process_index] for device in devices).values()
    )
    crossing = next(group for group in groups if len(group) > 1)
    raise ConfigError(
        f'mesh.model={model} reaches across hosts ({", ".join(sorted(crossing))}), '
        'and each layer would wait for their network: '
        f'set mesh.model to {largest} or a divisor of it, '
        f'for example mesh.data={len(devices) // largest} mesh.model={largest}, '
        'or mesh.allow_model_across_hosts=true'
    )


def _hosts() -> list[str]:
    """Return the host name of each process."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b'\0')
    names = np.asarray(multihost_utils.process_allgather(np.frombuffer(name, np.uint8)))
    return [bytes(row).rstrip(b'\0').decode(errors='replace') for row in names]


def _devices() -> list[jax.Device]:
    """Return jax's devices.

    Raises ConfigError if the requested platform has none, or if jax would leave GPUs idle.
    """
    wanted: str = jax.config.jax_platforms or ''  # type: ignore[attr-defined]
    try:
        devices = jax.devices()
    # An AssertionError if no plugin provides the requested platform.
    except (RuntimeError, AssertionError) as error:
        why = f': {str(error).partition(" (set JAX_PLATFORMS")[0]}' if str(error) else ''
        fix = 'see megajax doctor, or set JAX_PLATFORMS=cpu to train on simulated devices'
        raise ConfigError(
            f'JAX_PLATFORMS={wanted}, and jax has no such devices{why}; {fix}'
        ) from error
    if devices[0].platform == 'cpu' and not wanted and (gpus := visible_gpus()):
        fix = (
            "see megajax doctor (pip install 'megajax[cuda]'?), "
            'or set JAX_PLATFORMS=cpu to train on the CPU'
        )
        raise ConfigError(
            f'{gpus} GPUs are visible, and jax would leave them idle and use the CPU: {fix}'
        )
    return devices


def _simulate_cpu_devices(count: int) -> None:
    simulated: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if jax.distributed.is_initialized() or count <= simulated:
        return
    # Simulated devices wait for each other at each collective. On a busy machine one may be late,
    # and XLA's default timeout would end the process.
    patience = '--xla_cpu_collective_call_terminate_timeout_seconds'
    flags = os.environ.get('XLA_FLAGS', '')
    if patience not in flags:
        os.environ['XLA_FLAGS'] = f'{flags} {patience}=600'.strip()
    with contextlib.suppress(RuntimeError):  # jax already has its devices: make_mesh counts them
        jax.config.update('jax_num_cpu_devices', count)


def _too_few(sizes: Mapping[str, int], devices: list[jax.Device]) -> str:
    on_cpu, count = devices[0].platform == 'cpu', len(devices)
    kind = 'CPU' if on_cpu else devices[0].device_kind
    needed = math.prod(sizes.values())
    message = f'{_words(sizes)} needs {needed} devices and jax has {count} ({kind})'
    others = needed // (sizes['data'] * sizes['model'])
    free = count // others
    fits = ', '.join(f'{free // m}x{m}' for m in range(1, free + 1) if free % m == 0)
    if on_cpu:
        when = 'make the mesh before the first use of jax'
        return f'{message}: {when}, or choose data x model among {fits}'
    return f'{message}: choose data x model among {fits}, or JAX_PLATFORMS=cpu to simulate them'
