"""fp32 gradients of bf16 and fp16 weights, like Megatron's `main_grad`.

jax returns a cotangent in the dtype of its primal. A step that computes with weights in bf16 or
fp16 therefore differentiates with respect to fp32 gradient slots: zeros in place of these weights.
The backward pass of `product` returns a weight's gradient as the gradient of its slot.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.counts.declaration import Parameter, Role


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slotted:
    """A weight to compute with and the fp32 slot for its gradient; only matmuls accept it.

    A frozen weight has no slot. With `at_rest`, the weight is in its ZeRO-sharded storage layout,
    and each matmul gathers it.
    """

    weight: jax.Array
    slot: jax.Array | None
    at_rest: bool = dataclasses.field(default=False, metadata={'static': True})


def separate(weights: Any) -> tuple[Any | None, Any]:
    """Return the weights to compute with, and the tree to differentiate with respect to.

    The tree has an fp32 slot in place of each weight that is not in fp32; other weights are
    unchanged. The weights to compute with are None if all weights are in fp32.
    """

    def slot(x: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return x
        return jnp.zeros(x.shape, jnp.float32, out_sharding=jax.typeof(x).sharding)

    in_fp32 = all(x.dtype == jnp.float32 for x in jax.tree.leaves(weights))
    return (None, weights) if in_fp32 else (weights, jax.tree.map(slot, weights))


def pair(declared: Parameter, weight: jax.Array, slot: jax.Array) -> jax.Array | Slotted:
    """Return a weight with its slot if the weight is not in fp32; a frozen matrix has no slot."""
    if declared.is_frozen:
        return Slotted(weight=weight, slot=None) if declared.is_matrix else weight
    if declared.role is Role.SCALES:
        return Slotted(weight=weight, slot=slot)
    # The slot of a data shard's own experts is a part of the weight.
    is_same = weight.dtype == slot.dtype and weight.shape == slot.shape
    return slot if is_same else Slotted(weight=weight, slot=slot)


@jax.custom_vjp
def value(weight: jax.Array, slot: jax.Array) -> jax.Array:
    """Return the weight in fp32; its gradient goes to its slot."""
    return weight.astype(slot.dtype)  # cast back where it is used; XLA removes the pair of casts


def _forward(weight: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
    return value(weight, slot), None


def _backward(_: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, gradient


value.defvjp(_forward, _backward)
