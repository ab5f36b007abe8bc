"""The gradients of the layers' parameters, accumulated while the parts of a batch alternate."""

from collections import Counter, defaultdict
from functools import partial

import jax

from megajax.core.counts.layers import SUBLAYERS
from megajax.core.model import fp8
from megajax.core.model.fp8 import Quantized
from megajax.core.model.overlap.barriers import Box, Clock
from megajax.core.model.overlap.matrices import Key, Matrix
from megajax.core.model.overlap.sublayer_steps import SublayerSteps
from megajax.core.model.sublayer import Sublayer


class Gradients:
    """Gradients of all sublayers, summed over the parts.

    The head's gradient is included, if there is one, so that it is summed over `data` as well.
    """

    def __init__(
        self,
        clock: Clock,
        num_parts: int,
        reduce_dtype: str | None,
        head: tuple[Matrix | None, jax.Array | None],
    ):
        self._clock, self._num_parts, self._reduce_dtype = clock, num_parts, reduce_dtype
        self._head, self._of_head = head[0], Box(head[1])
        self._matrices: dict[Key, Box] = {}
        self._num_added = Counter[Key]()
        self._counts: dict[Key, jax.Array] = {}  # the exponent counts of fp8 operands
        self._vectors = defaultdict[int, list[Box]](list)
        self._adapters: dict[Key, Box] = {}

    def add(self, sublayer: SublayerSteps, linear: str, x: Box, dy: Box) -> None:
        """Add the gradient of a sublayer's `first` or `second` matrix, as one step.

        After the last part's gradient, the sum over `data` starts, if the backward pass has one.
        For a frozen matrix, only the gradients of its adapter are added, if it has one.
        """
        key = sublayer.place, linear
        if sublayer.is_frozen(linear):
            if sublayer.has_adapter(linear):
                before = [self._adapters[key]] if key in self._adapters else []
                of_adapter = partial(sublayer.gradient_of_adapter, linear)
                self._adapters[key] = self._clock.tick(sublayer.scope, of_adapter, x, dy, *before)
            return
        if key not in self._matrices and (total := sublayer.total(linear)) is not None:
            self._matrices[key] = Box(total)
        before = [self._matrices[key]] if key in self._matrices else []
        step = partial(sublayer.gradient_of_weight, linear)
        self._matrices[key] = self._clock.tick(sublayer.scope, step, x, dy, *before)
        if self._head and self._reduce_dtype and not self._num_added:
            # This comes after the matrices of the first matmuls, which would otherwise wait for it.
            reduce = partial(self._head.reduced, self._reduce_dtype)
            self._of_head = self._clock.send(self._head.scope, reduce, self._of_head)
        self._num_added[key] += 1
        if isinstance(x.value, Quantized):
            self._counts[key] = fp8.counts(x.value.counts, dy.value.counts) + self._counts.get(
                key, 0
            )
        if self._reduce_dtype is not None and self._num_added[key] == self._num_parts:
            if later := self._after(sublayer, linear):
                # Wait for the sum of the following layer: only one sum at a time is in flight and
                # in memory.
                self._clock.wait(sublayer.scope, later)
            reduce = partial(sublayer.matrix(linear).reduced, self._reduce_dtype)
            self._matrices[key] = self._clock.send(sublayer.scope, reduce, self._matrices[key])

    def _after(self, sublayer: SublayerSteps, linear: str) -> Box | None:
        """Return the sum of the same matrix in the following layer, or the head's sum."""
        of_head = self._of_head if self._head and sublayer.offset == 0 else None
        return self._matrices.get((sublayer.place + len(SUBLAYERS), linear), of_head)

    def add_vectors(self, sublayer: SublayerSteps, vectors: Box) -> None:
        """Add gradients of some of a sublayer's vectors, and zeros for its other vectors."""
        # The barrier ties them to the next step. Otherwise XLA postpones all sums over tokens to
        # the end of the pass, and holds their inputs in memory until then.
        self._vectors[sublayer.place].append(vectors)

    @property
    def of_head(self) -> jax.Array | None:
        """The gradient of the head in its stored sharding."""
        return self._of_head.value

    def of(self, sublayer: SublayerSteps) -> Sublayer:
        """Return the gradients of all parameters of a sublayer."""
        keys = [(sublayer.place, linear) for linear in ('first', 'second')]
        matrices, adapters = (
            [each[key].value if key in each else None for key in keys]
            for each in (self._matrices, self._adapters)
        )
        vectors = [box.value for box in self._vectors[sublayer.place]]
        total = jax.tree.map(lambda *each: sum(each[1:], each[0]), *vectors)
        counts = [self._counts[key] for key in keys] if self._counts else None
        return sublayer.gradients(total, matrices, adapters, counts)
