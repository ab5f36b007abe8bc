"""A mesh whose devices are rotated by one within each process, and copies of arrays on it.

Each device of the rotated mesh does the work of its predecessor in the same process, so that
nothing is copied between hosts. The only device of a process is its own successor.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


def rotated(mesh: Mesh) -> Mesh:
    """Return the mesh with each device replaced by the next one of the same process."""
    following = successors(mesh)
    devices = np.array([following[device] for device in mesh.devices.flat], dtype=object)
    return Mesh(devices.reshape(mesh.devices.shape), mesh.axis_names, axis_types=mesh.axis_types)


def successors(mesh: Mesh) -> dict[jax.Device, jax.Device]:
    """Return the next device of the same process for each device, in the order of the mesh."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in mesh.devices.flat:
        by_process.setdefault(device.process_index, []).append(device)
    return {
        device: own[(place + 1) % len(own)]
        for own in by_process.values()
        for place, device in enumerate(own)
    }


def copy_rotated(mesh: Mesh, tree: Any) -> Any:
    """Copy arrays from a mesh to the rotated mesh: each device's part goes to its successor.

    The copies share no memory with the arrays, which may be donated.
    """
    following, target = successors(mesh), rotated(mesh)

    def copy(x: jax.Array) -> jax.Array:
        own = x.addressable_shards
        copies = jax.device_put(
            [shard.data for shard in own],
            [following[shard.device] for shard in own],
            may_alias=False,
        )
        sharding = NamedSharding(target, jax.typeof(x).sharding.spec)
        return jax.make_array_from_single_device_arrays(x.shape, sharding, copies)

    return jax.tree.map(copy, tree)


def abstract_on(mesh: Mesh, tree: Any) -> Any:
    """Return the shapes and dtypes of arrays, allocated or abstract, placed by name on a mesh."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
        ),
        tree,
    )
