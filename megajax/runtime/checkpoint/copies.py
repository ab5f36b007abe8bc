"""Choose how many data shards, each with a copy of a model's weights, this machine has room for."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from megajax.core.config import Config, ConfigError
from megajax.core.counts.parameters import dtype_at_rest, num_at_rest, parameters
from megajax.core.hardware.memory import host_memory
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import devices_for


def with_copies_that_fit(config: Config) -> Config:
    """Return the config with fewer data shards if there are too few devices or too little memory.

    The number of data shards is a divisor of the config's, and a multiple of `mesh.experts`.
    Without any that fits, `mesh_for` and `check_copies` raise the error of the result.
    """
    mesh, devices = config.mesh, devices_for(config.mesh.num_devices)
    counts = [n for n in range(mesh.data, 0, -1) if mesh.data % n == 0 and n % mesh.experts == 0]
    configs = [
        config.model_copy(update={'mesh': mesh.model_copy(update={'data': n})}) for n in counts
    ]
    enough = [each for each in configs if each.mesh.num_devices <= len(devices)] or [config]
    return next((each for each in enough if not _lack(each, devices)), enough[-1])


def check_copies(config: Config, devices: Sequence[jax.Device]) -> None:
    """Raise ConfigError if the weights on these CPU devices need more memory than the host has."""
    if lack := _lack(config, devices):
        fewer = 'set mesh.data=1, or ' if config.mesh.data > 1 else ''
        raise ConfigError(f'{lack}: {fewer}use a host with more memory, or GPUs')


def _lack(config: Config, devices: Sequence[jax.Device]) -> str:
    """Return how much memory the weights need and the host has, or '' if it may have enough."""
    if jax.process_count() > 1 or any(device.platform != 'cpu' for device in devices):
        return ''
    layout, count, have = Layout.of(config), config.mesh.num_devices, host_memory()
    needed = count * sum(
        num_at_rest(x, config.model, layout) * jnp.dtype(dtype_at_rest(x, config)).itemsize
        for _, x in parameters(config.model)
    )
    if have is None or needed <= have:
        return ''
    where = 'a CPU' if count == 1 else f'{count} simulated devices'
    return (
        f'the weights need at least {needed / 1e9:.1f} GB on {where}, and this host has '
        f'{have / 1e9:.1f} GB'
    )
