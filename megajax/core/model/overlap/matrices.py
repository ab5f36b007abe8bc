"""The layers' matrices in the form that matmuls take, gathered over `data` before their use."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
from jax.typing import DTypeLike

from megajax.core.model import fp8, zero_sharding
from megajax.core.model.overlap.barriers import Box, Clock
from megajax.core.parallel.layout import Layout

AHEAD = 2  # number of gathers that are prefetched when a matmul begins, in addition to its own

Key = tuple[int, str]  # the index of a sublayer, and 'first' or 'second'


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of a sublayer, `stored` in one array for all layers, or the head's matrix."""

    key: Key
    scope: str
    stored: jax.Array
    index: int | None  # index of the layer
    dims: str
    layout: Layout
    dtype: DTypeLike

    def own(self, stored: jax.Array) -> jax.Array:
        """Return the matrix in the compute dtype."""
        return fp8.cast(stored if self.index is None else stored[self.index], self.dtype)

    def gathered(self, own: jax.Array) -> jax.Array:
        """Gather the matrix over `data`."""
        return zero_sharding.gather(own, self.dims, self.layout)

    def reduced(self, dtype: str, gradient: jax.Array) -> jax.Array:
        """Reduce-scatter its gradient over `data` to the stored shards, in a dtype."""
        return zero_sharding.sum_over_data(gradient, self.dims, self.layout, dtype)


class Matrices:
    """The matrices of one pass over sublayers.

    `uses` are the matrices in the order in which the pass first uses them. With `at_rest`, each
    matrix is prefetched shortly before its use, unless an earlier pass has `gathered` it.
    """

    def __init__(
        self,
        clock: Clock,
        uses: Sequence[Matrix],
        *,
        at_rest: bool,
        gathered: Mapping[Key, jax.Array] | None = None,
    ):
        self._clock, self._at_rest, self._gathered = clock, at_rest, gathered or {}
        self._uses, self._boxes = uses, list[Box]()
        self._places = {matrix.key: place for place, matrix in enumerate(uses)}

    def __call__(self, matrix: Matrix) -> Box:
        """Return a matrix by which the next step multiplies."""
        place = self._places[matrix.key]
        for use in self._uses[len(self._boxes) : place + 1 + AHEAD]:
            self._boxes.append(self._send(use))
        return self._boxes[place]

    def values(self) -> dict[Key, jax.Array]:
        """Return the matrices of the pass."""
        return {key: self._boxes[place].value for key, place in self._places.items()}

    def _send(self, matrix: Matrix) -> Box:
        if matrix.key in self._gathered:
            return Box(self._gathered[matrix.key])
        stored = Box(matrix.stored)
        if not self._at_rest:
            # This is a separate step; otherwise XLA would copy the matrices of all layers at once.
            return self._clock.send(matrix.scope, matrix.own, stored)
        return self._clock.send(matrix.scope, matrix.gathered, Box(matrix.own(stored.value)))
