"""The digest of a shard is that of its bits, and of nothing that another device has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding
from support import exhaustive

from megajax.core.parallel.mesh import make_mesh
from megajax.core.parallel.rotated_mesh import copy_rotated, rotated
from megajax.core.parallel.shard_digests import compile_digests


def digests(*arrays: jax.Array) -> np.ndarray:
    return np.asarray(compile_digests(arrays[0].sharding.mesh, arrays)(*arrays))


def flipped(x: jax.Array, device: int, bit: int) -> jax.Array:
    """The array with a bit flipped on one device, also where others have replicas."""
    shards = []
    for shard in x.addressable_shards:
        value = np.array(shard.data)
        if shard.device.id == device:
            value.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(value, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.mark.parametrize(
    'dtype',
    [
        *('float32', 'bfloat16', 'int8', 'float8_e4m3fn'),
        *(exhaustive(dtype) for dtype in ('float16', 'int32', 'uint32')),
    ],
)
def test_one_flipped_bit_on_one_device_changes_its_digest_of_this_array_alone(dtype):
    mesh = make_mesh(2, 2)
    value = np.arange(8).reshape(4, 2).astype(jnp.dtype(dtype))
    x = jax.device_put(value, NamedSharding(mesh, P('data', None)))  # a replica on each of `model`
    others = jax.device_put(np.float32(2), NamedSharding(mesh, P()))
    digest = compile_digests(mesh, (x, others))
    before = np.asarray(digest(x, others))
    assert before.shape == (4, 2)
    assert before[0, 0] == before[1, 0] != before[2, 0]
    for bit in range(8 * value.nbytes // 2):
        after = np.asarray(digest(flipped(x, 2, bit), others))
        assert np.argwhere(after != before).tolist() == [[2, 0]]


def test_digests_know_the_place_of_an_element_and_zeros_of_either_sign():
    mesh = make_mesh(1, 2)
    place = NamedSharding(mesh, P())

    def of(*values: float) -> int:
        return int(digests(jax.device_put(np.float32(values), place))[0, 0])

    assert len({of(1, 2, 3), of(2, 1, 3), of(3, 2, 1), of(1, 2, 0), of(1, 2, -0.0)}) == 5
    assert of(np.nan) == of(np.nan)


def test_the_digests_of_a_copy_on_the_rotated_mesh_are_those_of_the_array_place_by_place():
    mesh = make_mesh(2, 2)
    x = jax.device_put(np.arange(32.0).reshape(8, 4), NamedSharding(mesh, P(None, 'model')))
    flag = jax.device_put(np.bool_(True), NamedSharding(mesh, P()))
    x = flipped(x, 3, 5)
    copies = copy_rotated(mesh, (x, flag))
    assert copies[0].sharding.mesh == rotated(mesh)
    np.testing.assert_array_equal(digests(x, flag), digests(*copies))
