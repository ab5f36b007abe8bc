"""The memory that loading is predicted to need is that of the arrays that a model is loaded as."""

import math

import jax
import pytest

from megajax.core.config import load
from megajax.core.counts.loading import loading_bytes
from megajax.core.parallel.mesh import concrete, mesh_for
from megajax.runtime.checkpoint.open import abstract_params
from megajax.runtime.generate.weights import make_weights


def bytes_of_device(arrays: object) -> int:
    return sum(
        x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(arrays)
    )


@pytest.mark.parametrize('name', ['tiny', 'tiny_moe', 'tiny_vlm'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_generator_needs_memory_for_the_weights_as_stored_and_as_used(
    name: str, dtype: str
) -> None:
    config = load(name, ['mesh.data=2', 'mesh.model=2', f'train.dtype={dtype}'])
    with jax.set_mesh(mesh_for(config)):
        stored, cast = abstract_params(config), abstract_params(config, cast=True)
        used = concrete(jax.eval_shape(lambda: make_weights(config, cast)))
    assert loading_bytes(config, cast=False) == bytes_of_device(stored)
    assert loading_bytes(config, cast=True) == bytes_of_device(cast) + bytes_of_device(used)
