"""Digests of each device's parts of arrays, computed on that device.

Two arrays that differ in one element have different digests. If they differ in more elements, their
digests are equal with a probability of 2^-32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.stages import Compiled

from megajax.core.parallel.layout import UNSHARDED

# 2^32 divided by the golden ratio: the distance between the seeds of two elements
GOLDEN = 0x9E3779B9


def compile_digests(mesh: Mesh, arrays: Sequence[jax.ShapeDtypeStruct | jax.Array]) -> Compiled:
    """Compile a function of arrays on a mesh that returns uint32 [device of the mesh, array].

    Each device reads its own shard or replica of each array, and sends nothing.
    """

    def of_device(*shards: jax.Array) -> jax.Array:
        return jnp.stack([_digest(shard) for shard in shards])[None]

    def digests(*arrays: jax.Array) -> jax.Array:
        specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
        out = UNSHARDED.stacked('-', (mesh.axis_names,))
        return jax.shard_map(of_device, in_specs=specs, out_specs=out, check_vma=False)(*arrays)

    with jax.set_mesh(mesh):
        return jax.jit(digests).lower(*arrays).compile()


def _digest(x: jax.Array) -> jax.Array:
    """Return the sum of a bijection of each element's bits; it is different for each index."""
    word = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
    bits = x if x.dtype == jnp.bool else lax.bitcast_convert_type(x, word)
    bits = bits.astype(jnp.uint32).ravel()
    place = lax.iota(jnp.uint32, bits.size)
    return mix(bits + jnp.uint32(GOLDEN) * place).sum(dtype=jnp.uint32)


def mix(bits: jax.Array) -> jax.Array:
    """Return the last steps of MurmurHash3, in which each bit of the result depends on all bits."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
