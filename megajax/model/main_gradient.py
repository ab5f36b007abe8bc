"""Weights in the compute dtype whose gradients are made in fp32, which is what Megatron's `main_grad` is for.

jax gives a gradient the dtype of its array. So a layer that computes with weights in bf16 or fp16 is differentiated by zeros in fp32
that stand in their places, and each weight hands its gradient on to its zeros.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from megajax.parallel import layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightAndZeros:
    """What a layer has in the place of a weight: `product` computes with the one, and gives the gradient to the other."""

    weight: jax.Array
    zeros: jax.Array

    @property
    def ndim(self) -> int:
        return self.weight.ndim

    def __getitem__(self, index: Any) -> Self:  # which is how a parameter gives its value
        assert index is ...
        return self


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether the model uses the parameter in the compute dtype alone: all but norms, biases, learned positions and token types."""
    name = jax.tree_util.keystr(path)
    return not any(word in name for word in ('norm', 'bias', 'position', 'token_type'))


def cast_matrices(params: Any, dtype: DTypeLike) -> Any:
    """The parameters with each matrix in `dtype`, and whole on every data shard."""

    def cast(path: tuple[Any, ...], p: jax.Array) -> jax.Array:
        if not is_matrix(path):
            return p
        return jax.reshard(p.astype(dtype), layout.whole_over_data(p))  # all-gather over data, where it was sharded

    return jax.tree_util.tree_map_with_path(cast, params)


def separate(weights: Any) -> tuple[Any | None, Any]:
    """The weights to compute with, if some are not in fp32, and what to differentiate by: zeros in the place of these."""

    def zeros(x: jax.Array) -> jax.Array:
        return x if x.dtype == jnp.float32 else jnp.zeros(x.shape, jnp.float32, out_sharding=jax.typeof(x).sharding)

    in_fp32 = all(x.dtype == jnp.float32 for x in jax.tree.leaves(weights))
    return (None, weights) if in_fp32 else (weights, jax.tree.map(zeros, weights))


def pair(weights: Any, zeros: Any) -> Any:
    """`zeros` with pairs in the place of those that stand for weights in another dtype; for products alone."""
    return jax.tree.map(lambda w, z: z if w.dtype == z.dtype else WeightAndZeros(weight=w, zeros=z), weights, zeros)


def hand_on_gradients(weights: Any, zeros: Any) -> Any:
    """`zeros` with the values of those weights that are in another dtype; what keeps them for a backward pass has them in fp32."""
    return jax.tree.map(lambda w, z: z if w.dtype == z.dtype else _value_of_first(w, z), weights, zeros)


@jax.custom_vjp
def _value_of_first(weight: jax.Array, zeros: jax.Array) -> jax.Array:
    return weight.astype(zeros.dtype)  # cast back where it is used, which XLA takes for nothing


def _forward(weight: jax.Array, zeros: jax.Array) -> tuple[jax.Array, None]:
    return _value_of_first(weight, zeros), None


def _backward(_: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, gradient


_value_of_first.defvjp(_forward, _backward)
