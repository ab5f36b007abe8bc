"""Differences between a traced computation on a CPU and the same computation on a GPU."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

# XLA for CPUs has fast bf16 and fp16 matmuls for several rows, but not for a single row.
FAST_ROWS = 8


def is_on_cpu(x: jax.Array) -> bool:
    """Whether an array, which may be traced, is on a mesh of CPU devices."""
    return jax.typeof(x).sharding.mesh.abstract_device.platform == 'cpu'


def accumulation_dtype(x: jax.Array, dtype: DTypeLike) -> DTypeLike:
    """Return the dtype in which a matmul of x should return its result, to be cast to `dtype`.

    XLA's CPU backend multiplies bf16 fast only with an fp32 result. On other backends the result,
    and with it the reduction over `model`, is in the requested dtype.
    """
    return jnp.float32 if is_on_cpu(x) else dtype


def with_fast_rows(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """Add rows of zeros along an axis of size 1 if the device multiplies a single row slowly.

    `rows` is the number of rows per device.
    """
    if rows != 1 or x.dtype.itemsize != 2 or not is_on_cpu(x):
        return x
    return jnp.pad(x, [(0, FAST_ROWS - 1 if dim == axis else 0) for dim in range(x.ndim)])
