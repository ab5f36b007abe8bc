"""Collectives over `model` made by hand, and the arguments of a tensor-parallel MLP."""

import jax
import jax.numpy as jnp

from megajax.xla.hlo.collectives import Collective
from megajax.xla.hlo.program import Array


def reduced(op_name: str, array: Array, *, times: int = 1) -> Collective:
    """An all-reduce of an array over two devices."""
    return Collective(
        kind='all-reduce',
        axes=('model',),
        groups=((0, 1),),
        operand=array,
        result=array,
        times=times,
        at_most=False,
        op_name=op_name,
        source='',
        computation='main',
        instruction='all-reduce',
        synchronous=False,
        overlapped_flops=0,
    )


def arguments_of_mlp(mesh: jax.sharding.Mesh) -> list[jax.ShapeDtypeStruct]:
    """An input that is sharded over `data`, a column-parallel and a row-parallel matrix."""
    placed = {
        (8, 16): jax.P('data', None),
        (16, 64): jax.P(None, 'model'),
        (64, 16): jax.P('model', None),
    }
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in placed.items()
    ]
