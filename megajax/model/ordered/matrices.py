"""The matrices of the layers as their products take them, gathered over `data` before their use."""

from collections.abc import Mapping, Sequence
from functools import partial

import jax

from megajax.model.ordered.branch import Branch
from megajax.model.ordered.clock import Box, Clock
from megajax.model.ordered.head import Head

AHEAD = 2  # gathers that have started when a product begins, beside its own

Key = tuple[int, str]  # the place of a branch, and 'first' or 'second'
Use = tuple[Branch | Head, str]


class Matrices:
    """The matrices of one pass over branches.

    `uses` are branches and the names of their matrices, in the order in which the pass first uses
    them. Those `at_rest` are gathered, each a little before its use, but for those that another
    pass has `gathered`.
    """

    def __init__(
        self,
        clock: Clock,
        uses: Sequence[Use],
        *,
        at_rest: bool,
        gathered: Mapping[Key, jax.Array] | None = None,
    ):
        self._clock, self._at_rest, self._gathered = clock, at_rest, gathered or {}
        self._uses, self._boxes = uses, list[Box]()
        self._places = {(branch.place, linear): i for i, (branch, linear) in enumerate(uses)}

    def __call__(self, branch: Branch | Head, linear: str) -> Box:
        """Return the `first` or `second` matrix of a branch, which the next step multiplies by."""
        place = self._places[branch.place, linear]
        for sender, name in self._uses[len(self._boxes) : place + 1 + AHEAD]:
            self._boxes.append(self._send(sender, name))
        return self._boxes[place]

    def values(self) -> dict[Key, jax.Array]:
        """Return the matrices of the pass."""
        return {key: self._boxes[place].value for key, place in self._places.items()}

    def _send(self, branch: Branch | Head, linear: str) -> Box:
        if (branch.place, linear) in self._gathered:
            return Box(self._gathered[branch.place, linear])
        weights = branch.weights(linear)
        if not self._at_rest:
            # As a step of its own, or XLA would copy the matrices of all layers at once.
            return self._clock.send(branch.scope, branch.own, Box(weights))
        return self._clock.send(
            branch.scope, partial(branch.gathered, linear), Box(branch.own(weights))
        )
