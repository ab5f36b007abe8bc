"""A rotated mesh has the same devices in each process, and copies of arrays in the same places."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.rotated_mesh import copy_rotated, rotated, successors


class Device(NamedTuple):
    id: int
    process_index: int


def test_each_device_is_followed_by_the_next_one_of_its_process_in_the_order_of_the_mesh():
    devices = np.empty(6, dtype=object)
    devices[:] = [Device(number, number // 3) for number in (3, 0, 5, 1, 4, 2)]
    mesh = SimpleNamespace(devices=devices.reshape(2, 3))
    following = {device.id: after.id for device, after in successors(mesh).items()}
    assert following == {3: 5, 5: 4, 4: 3, 0: 1, 1: 2, 2: 0}


def test_a_rotated_mesh_has_the_axes_and_the_devices_of_the_mesh_and_none_in_its_place():
    mesh = make_mesh(2, 2, stage=2)
    other = rotated(mesh)
    assert (other.axis_names, other.shape, other.axis_types) == (
        mesh.axis_names,
        mesh.shape,
        mesh.axis_types,
    )
    assert set(other.devices.flat) == set(mesh.devices.flat)
    assert not np.any(other.devices == mesh.devices)
    assert rotated(make_mesh(1, 1)) == make_mesh(1, 1)


def test_copies_have_each_shard_and_replica_on_the_next_device_and_outlive_the_arrays():
    for mesh in (make_mesh(2, 2), make_mesh(1, 1)):
        following = successors(mesh)
        x = jax.device_put(np.arange(64.0).reshape(8, 8), NamedSharding(mesh, P('data', None)))
        shards = [s.data + s.device.id for s in x.addressable_shards]  # no two replicas are equal
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
        expected = {following[s.device]: np.array(s.data) for s in x.addressable_shards}
        copy = copy_rotated(mesh, {'x': x})['x']
        with jax.set_mesh(mesh):
            jax.jit(lambda x: -x, donate_argnums=0)(x)
        assert x.is_deleted()
        assert copy.sharding == NamedSharding(rotated(mesh), P('data', None))
        for shard in copy.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.device])
