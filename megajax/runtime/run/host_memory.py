"""Reject a run on simulated devices that does not fit in the host's memory, before it begins.

All simulated devices share the memory of one host. If a process needs more memory, the kernel kills
it without a message.
"""

import resource

import jax
from jax.sharding import Mesh

from megajax.core.config import Config, ConfigError
from megajax.core.counts.parameters import BYTES, num_at_rest, parameters
from megajax.core.counts.run_memory import stored_bytes
from megajax.core.hardware.memory import host_memory
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import host_names

# Bytes of address space that jax and its threads need on two cores, for a model of any size.
ADDRESSES = 2 * 10**9


def check_host_memory(config: Config, mesh: Mesh) -> None:
    """Raise ConfigError if the CPU devices of this host need more memory than it has.

    The host's memory includes its swap. Also raises ConfigError if this process's devices need more
    address space than it may use. All processes must call this.
    """
    if any(device.platform != 'cpu' for device in mesh.devices.flat):
        return
    hosts, process, each = host_names(), jax.process_index(), state_bytes(config)
    count = sum(hosts[device.process_index] == hosts[process] for device in mesh.devices.flat)
    needed, have = count * each, host_memory()
    if have is not None and needed > have:
        where = 'a CPU' if count == 1 else f'{count} simulated devices'
        raise ConfigError(
            f'training on {where} needs at least {needed / 1e9:.1f} GB for parameters, gradients '
            f'and moments, and this host has {have / 1e9:.1f} GB: {_remedy(config, have)}'
        )
    needed = sum(device.process_index == process for device in mesh.devices.flat) * each
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESSES + needed:
        raise ConfigError(
            f'the limit of address space (ulimit -v) is {limit / 1e9:.1f} GB, and this run needs '
            f'at least {(ADDRESSES + needed) / 1e9:.1f} GB: run it after ulimit -v unlimited, '
            'since XLA ends a process that cannot start its threads'
        )


def state_bytes(config: Config) -> int:
    """Return the bytes of parameters, moments and gradients on each device of a training step.

    This is a lower bound of a step's memory: activations and gathered weights are not included.
    Gradients count once, because all of them must exist before the update, which needs their norm.
    With `train.replay_every`, there is a second copy of parameters and moments.
    """
    layout, state = Layout.of(config), stored_bytes(config)
    learned = sum(
        num_at_rest(x, config.model, layout) for _, x in parameters(config.model) if not x.is_frozen
    )
    copied = state if config.train.replay_every else 0
    return state + BYTES[config.optim.reduce_dtype] * learned + copied


def _remedy(config: Config, have: int) -> str:
    mesh = config.mesh
    fewer = mesh.model_copy(update={'data': 1, 'replicas': 1, 'experts': 1})
    needed = fewer.num_devices * state_bytes(config.model_copy(update={'mesh': fewer}))
    if needed > have or mesh.data == 1:
        return 'train a smaller model here, or this one on GPUs'
    replaced = [f' mesh.{key}=1' for key in ('replicas', 'experts') if getattr(mesh, key) > 1]
    keys = ''.join(['mesh.data=1', *replaced])
    return f'set {keys} (at least {needed / 1e9:.1f} GB), or train a smaller model'
