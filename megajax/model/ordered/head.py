"""The matrix of the head at rest, which the order of the layers gathers beside the last of them."""

import dataclasses

import jax
from jax.typing import DTypeLike

from megajax.model import at_rest
from megajax.parallel.layout import Layout


@dataclasses.dataclass(frozen=True)
class Head:
    """What `Matrices` asks of a branch, for the matrix of the head; `weight` is at rest."""

    place: int
    weight: jax.Array
    layout: Layout
    dtype: DTypeLike
    scope: str = 'head'

    def weights(self, linear: str) -> jax.Array:
        """Return the matrix at rest."""
        return self.weight

    def own(self, weight: jax.Array) -> jax.Array:
        """Return it in the dtype of the computation."""
        return weight.astype(self.dtype)

    def gathered(self, linear: str, weight: jax.Array) -> jax.Array:
        """Gather it over `data`."""
        return at_rest.gather(weight, 'Vd', self.layout)

    def reduced(self, dtype: str, gradient: jax.Array) -> jax.Array:
        """Sum its gradient over `data` to the shards at rest, in a dtype."""
        return at_rest.sum_over_data(gradient, 'Vd', self.layout, dtype)
