"""Per-layer arrays of the layers' matrices, for layers that are compiled separately.

A layer's part of a stacked array would be copied in each pass of each microbatch. Also, a matmul
can accumulate into a whole array, but not into a part of a stack. Here, the gradient slot of a
per-layer array holds the gradients of earlier microbatches, and the backward pass returns the sum
as the gradient of the slot.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.model.parameters import map_parameters

Stack = jax.Array | tuple[jax.Array, ...]  # an array [layer, ...], or one array for each layer


def apart(stack: jax.Array) -> tuple[jax.Array, ...]:
    """Return an array for each layer."""
    return tuple(stack[index] for index in range(len(stack)))


def together(stack: Stack, axis: int = 0) -> jax.Array:
    """Return one array, in which `axis` is the dim of the layers."""
    return jnp.stack(stack, axis) if isinstance(stack, tuple) else stack


def holds_totals(layers: Any, weights: Any | None) -> bool:
    """Whether `layers` are gradient slots that hold the gradients of earlier microbatches."""
    stacks = jax.tree.leaves(layers, is_leaf=lambda x: isinstance(x, tuple))
    return weights is not None and any(isinstance(stack, tuple) for stack in stacks)


def with_totals(slots: Any, totals: Any) -> Any:
    """Return gradient slots; per-layer slots hold the gradients of earlier microbatches."""
    return map_parameters(
        lambda _, slot, total: total if isinstance(slot, tuple) else slot, slots, totals
    )


def added(totals: Any, gradients: Any) -> Any:
    """Add gradients to earlier microbatches' totals, which per-layer gradients already include."""
    return map_parameters(
        lambda _, total, gradient: gradient if isinstance(total, tuple) else total + gradient,
        totals,
        gradients,
    )


def of_layer(layers: Any, index: int) -> Any:
    """Return the parameters of one layer."""
    return map_parameters(lambda _, stack: stack[index], layers)


def of_all(layers: Any, blocks: Sequence[Any]) -> Any:
    """Return the parameters of `blocks`, stacked or per layer like the parameters of `layers`.

    A parameter without a value in the blocks has none in the result.
    """

    def join(_: Any, stack: Stack, *of_blocks: Any) -> Any:
        if of_blocks[0] is None:
            return None
        return of_blocks if isinstance(stack, tuple) else jnp.stack(of_blocks)

    return map_parameters(join, layers, *blocks)
