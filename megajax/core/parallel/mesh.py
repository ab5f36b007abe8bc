"""Meshes of devices: the machine's GPUs or, if it has none, simulated devices on a CPU."""

import math
import os
import re
import reprlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax._src.xla_bridge import backends_are_initialized  # jax has no public way to ask
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from megajax.core.config import Config, ConfigError, mistake
from megajax.core.config.extras import install
from megajax.core.hardware.cpu_flags import two_threads_each, with_collective_limit
from megajax.core.hardware.memory import claim_gpu_memory
from megajax.core.hardware.visible import visible_gpus
from megajax.core.parallel.hosts import Hosts, check_hosts, data_shards, nvlink_domain
from megajax.core.parallel.layout import UNSHARDED

# Mesh axes, outermost first. The axes that communicate most, with the computation waiting for the
# result, are innermost.
Axis = Literal['replica', 'stage', 'data', 'expert', 'context', 'row', 'model']
AXES: tuple[Axis, ...] = get_args(Axis)
ALWAYS = ('data', 'model')  # axes of every mesh, even with one device
KEYS = {
    'stage': 'stages',
    'expert': 'experts',
    'row': 'model_rows',
}  # keys of `mesh` whose name differs from their axis
# boolean settings of jax, the value that a step needs, and the reason
SETTINGS = (
    ('jax_enable_x64', False, 'a step computes in at most 32 bits'),
    ('jax_threefry_partitionable', True, 'dropout masks would depend on the mesh'),
)
HOST_BYTES = 256  # maximum length of a host's name in bytes
# files of which one exists wherever jax looks for GPUs
NVIDIA = '/dev/nvidia0', '/dev/nvidiactl', '/dev/dxg'


def mesh_for(config: Config) -> Mesh:
    """Return the mesh of `config.mesh`; see `make_mesh`.

    Also raises ConfigError if jax has a setting that a step does not support.
    """
    _check_settings()
    mesh = config.mesh
    return make_mesh(**mesh.sizes, cross_hosts=mesh.allow_model_across_hosts)


def make_mesh(data: int = 1, model: int = 1, *, cross_hosts: bool = False, **axes: int) -> Mesh:
    """Return a mesh with Explicit axes in the order of AXES, `model` innermost.

    A tensor-parallel group therefore consists of neighbors on one host. `axes` are the sizes of
    axes other than `data` and `model`; an axis of size 1 is not in the mesh, and an axis that is
    not in AXES comes after `data`. If jax has not been used yet, it gets the share of GPU memory
    that `megajax plan` assumes. If the machine has only CPUs, jax simulates the required number of
    devices.

    Raises ConfigError if there are too few devices, or if groups of devices span hosts
    unnecessarily (`check_hosts`). With several processes, all of them must call it.
    """
    sizes = axis_sizes(data, model, **axes)
    needed = math.prod(sizes.values())
    devices = devices_for(needed)
    if len(devices) < needed:
        raise ConfigError(_too_few(sizes, devices))
    if jax.process_count() > 1 and len(devices) != needed:
        raise ConfigError(left_idle(sizes, len(devices), jax.process_count()))
    if jax.process_count() > 1:
        devices = _within_hosts(devices, sizes, cross_hosts)
    return mesh_of(devices[:needed], sizes)


def axis_sizes(data: int = 1, model: int = 1, **axes: int) -> dict[str, int]:
    """Return the axes of a mesh and their sizes, outermost first."""
    sizes = axes | {'data': data, 'model': model}
    after_data = AXES.index('data') + 0.5
    order = sorted(sizes, key=lambda axis: AXES.index(axis) if axis in AXES else after_data)
    return {axis: sizes[axis] for axis in order if sizes[axis] > 1 or axis in ALWAYS}


def check_is_config(config: object) -> None:
    """Raise ConfigError if a script passes anything other than a config, such as its name."""
    if not isinstance(config, Config):
        message = f'{reprlib.repr(config)} is not a megajax.Config; give what megajax.load returns'
        raise mistake('config', message)


def check_current_mesh(config: Config) -> None:
    """Raise ConfigError unless `config` is a config and the current mesh is the config's.

    The mesh may have more axes, which are not in AXES or have size 1. Also raises ConfigError if
    jax has a setting that a step does not support.
    """
    check_is_config(config)
    _check_settings()
    wanted, current = axis_sizes(**config.mesh.sizes), jax.sharding.get_abstract_mesh().shape
    needed = {axis for axis in AXES if axis in ALWAYS or current.get(axis, 1) > 1}
    if wanted == {axis: size for axis, size in current.items() if axis in needed}:
        return
    further = [f'{axis}={size}' for axis, size in wanted.items() if axis not in ALWAYS]
    arguments = ', '.join([str(wanted['data']), str(wanted['model']), *further])
    there = ' x '.join(f'{axis}={size}' for axis, size in current.items())
    message = (
        f'{_words(wanted)}, and {f"the current mesh is {there}" if there else "no mesh is set"}; '
        f'call jax.set_mesh(megajax.make_mesh({arguments}))'
    )
    raise mistake('mesh', message)


def mesh_of(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of these devices, which may be abstract, with Explicit axes.

    `core/hardware/targets.py` makes abstract devices.
    """
    grid = np.array(devices).reshape(*sizes.values())
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def _check_settings() -> None:
    """Raise ConfigError if a setting of jax has a value with which a step fails or changes."""
    for name, default, why in SETTINGS:
        if getattr(jax.config, name, default) != default:  # not every jax has each setting
            fix = f'unset {name.upper()}, or call jax.config.update({name!r}, {default})'
            raise ConfigError(f'{name}={not default} is not supported: {why}; {fix}')


def _words(sizes: Mapping[str, int]) -> str:
    """Return the sizes by the keys of the config, for example mesh.data=4 x mesh.model=2."""
    keys = {axis: size for axis, size in sizes.items() if axis != 'replica'}
    keys = {**keys, 'data': data_shards(sizes)}
    words = ' x '.join(f'mesh.{KEYS.get(axis, axis)}={size}' for axis, size in keys.items())
    return f'{words} (mesh.replicas={sizes["replica"]})' if 'replica' in sizes else words


def left_idle(sizes: Mapping[str, int], count: int, processes: int) -> str:
    """Return the error of a mesh that is smaller than the `count` devices of these processes.

    It names a mesh of all devices: with more data shards, or with any other shape if no number of
    data shards fits.
    """
    replicas, experts = sizes.get('replica', 1), sizes.get('expert', 1)
    needed = math.prod(sizes.values())
    data, rest = divmod(count * data_shards(sizes), needed)
    if rest or data % experts:
        fix = _choices(sizes, count, fill=True)
    else:
        other = math.gcd(replicas, data // experts)
        fix = f'set mesh.data={data}' + (f' mesh.replicas={other}' if other != replicas else '')
    return (
        f'{_words(sizes)} leaves {count - needed} of {count} devices idle, and with {processes} '
        f'processes each must have its part: {fix}'
    )


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
        spec = UNSHARDED('') if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_mesh, abstract)


def _within_hosts(
    devices: list[jax.Device], sizes: Mapping[str, int], cross_hosts: bool
) -> list[jax.Device]:
    """Return the devices with each host's devices adjacent, however its processes are numbered.

    Raises ConfigError as `check_hosts` does.
    """
    hosts = host_names()
    devices = sorted(devices, key=lambda device: hosts.index(hosts[device.process_index]))
    names = [hosts[device.process_index] for device in devices]
    domain = nvlink_domain(devices[0].device_kind)
    check_hosts(Hosts(names, domain), sizes, cross_hosts=cross_hosts)
    return devices


def devices_per_host(mesh: Mesh) -> int:
    """Return how many devices of the mesh each host has; all processes must call this."""
    return mesh.size // (1 if jax.process_count() == 1 else len(set(host_names())))


def host_names() -> list[str]:
    """Return the host name of each process; all processes must call this."""
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b'\0')
    own = np.frombuffer(name, np.uint8)[None]
    names = (
        own
        if jax.process_count() == 1
        else np.asarray(multihost_utils.process_allgather(own, tiled=True))
    )
    return [bytes(row).rstrip(b'\0').decode(errors='replace') for row in names]


def devices_for(count: int) -> list[jax.Device]:
    """Return jax's devices; if they are CPUs and jax has not been used yet, simulate `count`.

    Raises ConfigError as `usable_devices` does.
    """
    # Of several processes, each is told at its start how many devices it simulates.
    if backends_are_initialized() or jax.distributed.is_initialized():
        return usable_devices()
    _simulate_cpu_devices(count)
    with two_threads_each(count):
        return usable_devices()


def usable_devices() -> list[jax.Device]:
    """Return jax's devices, with the share of GPU memory that `megajax plan` assumes.

    Raises ConfigError if the requested platform has none, or if jax would leave GPUs idle.
    """
    claim_gpu_memory()
    wanted: str = jax.config.jax_platforms or ''  # type: ignore[attr-defined]
    if not any(os.path.exists(device) for device in NVIDIA):
        # Otherwise a CUDA plugin that is installed only to compile prints a traceback, because the
        # libraries that run its programs are missing.
        os.environ.setdefault('JAX_SKIP_CUDA_CONSTRAINTS_CHECK', '1')
    try:
        devices = jax.devices()
    # An AssertionError is raised if no plugin provides the requested platform.
    except (RuntimeError, AssertionError) as error:
        why = f': {str(error).partition(" (set JAX_PLATFORMS")[0]}' if str(error) else ''
        fix = 'see megajax doctor, or set JAX_PLATFORMS=cpu to train on simulated devices'
        raise ConfigError(
            f'JAX_PLATFORMS={wanted}, and jax has no such devices{why}; {fix}'
        ) from error
    if devices[0].platform == 'cpu' and not wanted and (gpus := visible_gpus()):
        fix = (
            f'see megajax doctor ({install("cuda")}?), or set JAX_PLATFORMS=cpu to train on the CPU'
        )
        raise ConfigError(
            f'{gpus} GPUs are visible, and jax would leave them idle and use the CPU: {fix}'
        )
    return devices


def _simulate_cpu_devices(count: int) -> None:
    simulated: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    if count <= simulated:
        return
    flags = os.environ.get('XLA_FLAGS', '')
    # jax's own setting takes precedence over this XLA flag, which also sets the device count.
    asked = re.search(r'--xla_force_host_platform_device_count=(\d+)', flags)
    count = max(count, int(asked[1]) if asked else 0)
    os.environ['XLA_FLAGS'] = with_collective_limit(flags)
    jax.config.update('jax_num_cpu_devices', count)


def _too_few(sizes: Mapping[str, int], devices: list[jax.Device]) -> str:
    on_cpu, count = devices[0].platform == 'cpu', len(devices)
    kind = 'CPU' if on_cpu else devices[0].device_kind
    needed = math.prod(sizes.values())
    message = f'{_words(sizes)} needs {needed} devices, but jax has {count} ({kind})'
    choose = _choices(sizes, count)
    if on_cpu:
        return f'{message}: make the mesh before the first use of jax, or {choose}'
    return f'{message}: {choose}, or JAX_PLATFORMS=cpu to simulate them'


def _choices(sizes: Mapping[str, int], count: int, *, fill: bool = False) -> str:
    """Return the sizes of `data` and `model` that fit on `count` devices, in words.

    With `fill`, they leave no device idle.
    """
    groups = {axis: sizes[axis] for axis in ('replica', 'expert') if axis in sizes}
    shards = math.prod(groups.values())  # mesh.data must be a multiple of this number
    others = math.prod(sizes.values()) // (data_shards(sizes) * sizes['model'])
    less = []
    if others > count or (fill and count % others):
        beside = [axis for axis in sizes if axis not in (*groups, *ALWAYS)]
        others, less = 1, [f'mesh.{KEYS.get(axis, axis)}=1' for axis in beside]
    free = count // others
    fits = [(free // m, m) for m in range(1, free + 1) if free % m == 0]
    if any(data % shards == 0 for data, _ in fits):
        fits = [(data, m) for data, m in fits if data % shards == 0]
    else:
        less += [f'mesh.{axis}s=1' for axis in groups]
    with_less = f' with {", ".join(less)}' if less else ''
    return f'choose data x model among {", ".join(f"{d}x{m}" for d, m in fits)}{with_less}'
