"""The matrix product of every layer, and its two gradients.

Operands are in the compute dtype; the gradient of a weight is accumulated and left in fp32, as Megatron's main gradients are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.typing import DTypeLike

from megajax.model.main_gradient import WeightAndZeros
from megajax.parallel.layout import with_rows_of


def product(x: jax.Array, w: jax.Array | WeightAndZeros, contract: int, out_sharding: P, out_dtype: DTypeLike) -> jax.Array:
    """Contract the last `contract` dims of x with the first ones of w, which is cast to the dtype of x.

    Where the contracted dims are sharded over `model`, XLA reduces the partial sums to `out_sharding`; the same holds in the
    backward pass for the gradient of x, which gets the placement of x.
    """
    weight, zeros = (w.weight, w.zeros) if isinstance(w, WeightAndZeros) else (w, None)
    return _product(x, weight, zeros, contract, out_sharding, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(x: jax.Array, w: jax.Array, zeros: jax.Array | None, contract: int, out_sharding: P, out_dtype: DTypeLike) -> jax.Array:
    dims = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return _dot(x, w.astype(x.dtype), dims, out_sharding, out_dtype)


Saved = tuple[jax.Array, jax.Array, tuple[()] | None]


def _forward(
    x: jax.Array, w: jax.Array, zeros: jax.Array | None, contract: int, out_sharding: P, out_dtype: DTypeLike
) -> tuple[jax.Array, Saved]:
    # w as it is: a loop over layers has it already, and would keep a copy of anything made of it.
    return _product(x, w, zeros, contract, out_sharding, out_dtype), (x, w, None if zeros is None else ())


def _backward(
    contract: int, out_sharding: P, out_dtype: DTypeLike, saved: Saved, dy: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, w, has_zeros = saved
    dy, rows = dy.astype(x.dtype), with_rows_of(x, dy, x.ndim - contract)
    if jax.typeof(dy).sharding.spec != rows:  # SP: the result is sharded over the sequence
        # Gathered once for both products. A cotangent that a loop carries has no placement of its own yet, and Shardy would let its
        # other readers, such as the residual stream, read the gathered array and slice it: the barrier is a value of its own.
        dy = jax.reshard(lax.optimization_barrier(dy), rows)
    out_dims = w.ndim - contract
    dims = tuple(range(dy.ndim - out_dims, dy.ndim)), tuple(range(contract, w.ndim))
    dx = _dot(dy, w.astype(x.dtype), dims, jax.typeof(x).sharding.spec, x.dtype)
    batch = tuple(range(x.ndim - contract))
    dw = _dot(x, dy, (batch, batch), jax.typeof(w).sharding.spec, jnp.float32)
    return (dx, dw, None) if has_zeros is None else (dx, None, dw)


_product.defvjp(_forward, _backward)


def _dot(x: jax.Array, w: jax.Array, dims: tuple[tuple[int, ...], tuple[int, ...]], out_sharding: P, out_dtype: DTypeLike) -> jax.Array:
    # XLA's CPU backend multiplies bf16 fast only into an fp32 result; elsewhere the result, and with it the reduction over
    # `model`, is in the dtype that was asked for.
    on_cpu = jax.typeof(x).sharding.mesh.abstract_device.platform == 'cpu'
    preferred = jnp.float32 if on_cpu else out_dtype
    y = lax.dot_general(x, w, (dims, ((), ())), preferred_element_type=preferred, out_sharding=out_sharding)
    return y.astype(out_dtype)
