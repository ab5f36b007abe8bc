"""Choose the number of data shards, each with a copy of the weights, that fits this machine."""

import math
from collections.abc import Sequence

import jax

from megajax.core.config import Config, ConfigError
from megajax.core.counts.loading import loading_bytes
from megajax.core.hardware.memory import host_memory
from megajax.core.parallel.mesh import devices_for


def with_copies_that_fit(config: Config, *, cast: bool) -> Config:
    """Return the config with fewer data shards if there are too few devices or too little memory.

    The number of data shards is a divisor of the config's, and `mesh.experts` becomes a divisor of
    both. `cast` is as in `open_model`. If no number fits, `mesh_for` and `check_copies` raise the
    error of the result.
    """
    mesh, devices = config.mesh, devices_for(config.mesh.num_devices)
    counts = [count for count in range(mesh.data, 0, -1) if mesh.data % count == 0]
    sizes = [{'data': count, 'experts': math.gcd(mesh.experts, count)} for count in counts]
    configs = [
        config.model_copy(update={'mesh': mesh.model_copy(update=update)}) for update in sizes
    ]
    enough = [each for each in configs if each.mesh.num_devices <= len(devices)] or [config]
    fits = (each for each in enough if not _shortage(each, devices, cast=cast))
    return next(fits, enough[-1])


def check_copies(config: Config, devices: Sequence[jax.Device], *, cast: bool) -> None:
    """Raise ConfigError if the weights on these CPU devices need more memory than the host has."""
    if shortage := _shortage(config, devices, cast=cast):
        keys = [key for key in ('data', 'experts') if getattr(config.mesh, key) > 1]
        fewer = f'set {" ".join(f"mesh.{key}=1" for key in keys)}, or ' if keys else ''
        raise ConfigError(f'{shortage}: {fewer}use a host with more memory, or GPUs')


def _shortage(config: Config, devices: Sequence[jax.Device], *, cast: bool) -> str:
    """Return a sentence if the host has less memory than the weights need; otherwise ''."""
    if jax.process_count() > 1 or any(device.platform != 'cpu' for device in devices):
        return ''
    count, memory = config.mesh.num_devices, host_memory()
    needed = count * loading_bytes(config, cast=cast)
    if memory is None or needed <= memory:
        return ''
    where = 'a CPU' if count == 1 else f'{count} simulated devices'
    return (
        f'loading the weights needs at least {needed / 1e9:.1f} GB on {where}, and this host has '
        f'{memory / 1e9:.1f} GB'
    )
