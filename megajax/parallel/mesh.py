"""From devices to a mesh: GPUs where there are some, simulated devices on a CPU."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from megajax.config import ConfigError
from megajax.parallel.layout import SCALAR

AXES = ('data', 'model')


def make_mesh(data: int = 1, model: int = 1) -> Mesh:
    """A mesh ('data', 'model') with Explicit axes, `model` innermost: a tensor-parallel group is neighbours on one host.

    Where the machine has only CPUs and jax has not been used yet, data x model devices are simulated. Raises ConfigError if
    there are too few devices.
    """
    needed = data * model
    _simulate_cpu_devices(needed)
    devices = jax.devices()
    if len(devices) < needed:
        raise ConfigError(_too_few(data, model, devices))
    if jax.process_count() > 1 and len(devices) != needed:
        raise ConfigError(
            f'mesh.data={data} x mesh.model={model} leaves {len(devices) - needed} of {len(devices)} devices idle, and with '
            f'{jax.process_count()} processes each must have its part: set mesh.data={len(devices) // model}'
        )
    return mesh_of(devices[:needed], data, model)


def mesh_of(devices: Sequence[Any], data: int, model: int) -> Mesh:
    """These devices as a mesh ('data', 'model') with Explicit axes; they need not be there (`inspect/gpu.py`)."""
    return Mesh(np.array(devices).reshape(data, model), AXES, axis_types=(AxisType.Explicit,) * 2)


def is_simulated(mesh: Mesh) -> bool:
    """Whether the devices of the mesh share one CPU."""
    return mesh.size > 1 and all(device.platform == 'cpu' for device in mesh.devices.flat) and jax.process_count() == 1


def concrete(abstract: Any) -> Any:
    """The shapes and places of an abstract tree (`jax.eval_shape`), with the places on the current mesh."""
    mesh = jax.sharding.get_mesh()

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = SCALAR if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, abstract)


def _simulate_cpu_devices(count: int) -> None:
    simulated: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if jax.distributed.is_initialized() or count <= simulated:
        return
    # Simulated devices meet at each collective; on a busy machine one may be late, and XLA's default ends the process then.
    patience = '--xla_cpu_collective_call_terminate_timeout_seconds'
    flags = os.environ.get('XLA_FLAGS', '')
    if patience not in flags:
        os.environ['XLA_FLAGS'] = f'{flags} {patience}=600'.strip()
    with contextlib.suppress(RuntimeError):  # jax has its devices already: make_mesh counts them
        jax.config.update('jax_num_cpu_devices', count)


def _too_few(data: int, model: int, devices: list[jax.Device]) -> str:
    kind = devices[0].device_kind if devices[0].platform != 'cpu' else 'CPU'
    message = f'mesh.data={data} x mesh.model={model} needs {data * model} devices and jax has {len(devices)} ({kind})'
    fits = ', '.join(f'{len(devices) // m}x{m}' for m in range(1, len(devices) + 1) if len(devices) % m == 0)
    if devices[0].platform == 'cpu':
        return f'{message}: make the mesh before the first use of jax, or choose data x model among {fits}'
    return f'{message}: choose data x model among {fits}, or JAX_PLATFORMS=cpu to simulate them'
