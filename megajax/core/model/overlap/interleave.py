"""Interleave the parts of a microbatch through the layers, forward and backward.

Each part is a generator. It yields when the other part should run: after it starts a collective,
and between two matmuls when the other part has a collective to start. One part's communication thus
overlaps the other's computation.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from megajax.core.counts.layers import SUBLAYERS
from megajax.core.model.overlap.barriers import Box, Clock, Meeting, Steps
from megajax.core.model.overlap.gradients import Gradients
from megajax.core.model.overlap.matrices import Matrices
from megajax.core.model.overlap.sublayer_steps import SublayerSteps
from megajax.core.model.sublayer import Sublayer


class Kept(NamedTuple):
    """The values that a sublayer saves for the backward pass of a part, in boxes or as arrays."""

    x_BTD: Any
    enter: Any  # the transpose of the norm
    h_BSD: Any  # the input of the first matmul
    pull: Any  # the transpose of the operations between the matmuls
    z: Any  # the input of the second matmul
    y_BTD: Any  # the second matmul's result, if the sublayer saves it


class Pending(NamedTuple):
    """A sublayer, with the gradient of its norm's output, whose collective has started."""

    sublayer: SublayerSteps
    enter: Box
    dh_BTD: Box


class Turns:
    """The parts of a batch in one pass over the layers.

    The parts have different sequences or, with `meets`, different tokens of the same sequences;
    attention needs the tokens of all parts.
    """

    def __init__(self, clock: Clock, matrices: Matrices, num_parts: int, *, meets: bool):
        self.clock, self.matrices = clock, matrices
        self._meets, self._early = meets, set[int]()
        self._later: dict[int, Callable[[], None]] = {}
        self._meetings = defaultdict[int, Meeting](lambda: Meeting(num_parts))

    def forward(
        self,
        part: int,
        x: Box,
        sublayers: Sequence[SublayerSteps],
        entered: tuple[Box, Box] | None = None,
    ) -> Steps:
        """Return the residual stream and the values that each sublayer saves.

        Recomputation in a backward pass starts after the norm of the first sublayer, given as
        `entered`, and ends before the matmuls of the last sublayer.
        """
        clock, kept = self.clock, list[Kept]()
        h, enter = entered or self._enter(sublayers[0], x)
        for sublayer, after in zip(sublayers, [*sublayers[1:], None], strict=True):
            if sublayer.place > sublayers[0].place and sublayer.is_scattered:
                h = clock.send(sublayer.scope, sublayer.gather, h)
            if entered and after is None:
                return x, [*kept, Kept(x, enter, h, None, None, None)]
            if sublayer.is_scattered:
                yield
            y = self._first(sublayer, h)
            if sublayer.is_scattered:
                yield
            pull, z = yield from self._middle(part, sublayer, y)
            sums = clock.tick(
                sublayer.scope, sublayer.second, self.matrices(sublayer.matrix('second')), z
            )
            yield from self._let_ahead(part, sublayer)
            total = clock.send(sublayer.scope, sublayer.sum, sums)
            output = total if sublayer.keeps_output else Box(None)
            kept.append(Kept(x, enter, h, pull, z, output))
            yield
            x, *normed = clock.ticks(sublayer.scope, partial(_turn, sublayer, after), x, total)
            if normed:
                h, enter = normed
        return x, kept

    def _enter(self, sublayer: SublayerSteps, x: Box) -> tuple[Box, Box]:
        """Return the first matmul's input and the transpose of the norm."""
        h, pull = self.clock.ticks(sublayer.scope, sublayer.enter, x)
        return self.clock.send(
            sublayer.scope, sublayer.gather, h
        ) if sublayer.is_scattered else h, pull

    def _first(self, sublayer: SublayerSteps, h: Box) -> Box:
        return self.clock.tick(
            sublayer.scope, sublayer.first, self.matrices(sublayer.matrix('first')), h
        )

    def _middle(
        self, part: int, sublayer: SublayerSteps, y: Box
    ) -> Generator[None, None, tuple[Box, Box]]:
        """Return the transpose of the middle operations, and the second matmul's input."""
        *zs, pull = yield from self._together(part, sublayer, sublayer.middle_and_pull, y)
        # Parts that meet share one transpose, which the first of them saves.
        return pull if len(zs) == 1 or part == 0 else Box(None), zs[part % len(zs)]

    def backward(
        self,
        part: int,
        dx: Box,
        kept: Sequence[Kept],
        sublayers: Sequence[SublayerSteps],
        gradients: Gradients,
    ) -> Steps:
        """Return the gradient of the residual stream before the sublayers.

        `kept` has the values that each sublayer saved or, with full recomputation, the residual
        stream before each block and the output of the block's last sublayer.
        """
        count = len(SUBLAYERS)
        pending, again = None, [sublayer.again for sublayer in sublayers]
        is_full = len(kept) < len(sublayers)
        entered = self._enter(again[-count], kept[-1].x_BTD) if is_full else None
        for first in reversed(range(0, len(sublayers), count)):
            block, saved = slice(first, first + count), kept[first : first + count]
            if is_full:
                of_block = kept[first // count]
                x, again_block = of_block.x_BTD, again[block]
                _, saved = yield from self.forward(part, x, again_block, entered)
                saved[-1] = saved[-1]._replace(y_BTD=of_block.y_BTD)
            for sublayer, own in zip(reversed(sublayers[block]), reversed(saved), strict=True):
                dx, dy = self._turn_back(pending, sublayer, dx, gradients, own.y_BTD)
                if is_full and sublayer.offset == 0 and first:
                    # The gather for the recomputation of the previous layer overlaps with these
                    # matmuls.
                    entered = self._enter(again[first - count], kept[first // count - 1].x_BTD)
                dh = yield from self._products_back(part, sublayer, own, dy, gradients)
                pending = Pending(sublayer, own.enter, dh)
        self._do_one(part)
        dx, _ = self._turn_back(pending, None, dx, gradients)
        return dx

    def _products_back(
        self, part: int, sublayer: SublayerSteps, kept: Kept, dy: Box, gradients: Gradients
    ) -> Steps:
        """Return the gradient of a sublayer's norm output, whose sum has started."""
        clock, scope = self.clock, sublayer.scope
        if sublayer.is_scattered:
            dy = clock.send(scope, sublayer.gather, dy)
            yield
        if kept.z is None:
            again = sublayer.again
            pull, z = yield from self._middle(part, again, self._first(again, kept.h_BSD))
            kept = kept._replace(pull=pull, z=z)
        second = self.matrices(sublayer.matrix('second'))
        dz = clock.tick(scope, sublayer.gradient_of_second, second, dy)
        if sublayer.is_scattered:
            yield
        pulls = [] if kept.pull.value is None else [kept.pull]
        *dys, vectors = yield from self._together(part, sublayer, sublayer.pull_middle, *pulls, dz)
        d_first = dys[part % len(dys)]
        if pulls:
            gradients.add_vectors(sublayer, vectors)
        first = self.matrices(sublayer.matrix('first'))
        sums = clock.tick(scope, sublayer.gradient_of_first, first, d_first)
        was_early = yield from self._let_ahead(part, sublayer)
        dh = clock.send(scope, sublayer.sum, sums)
        gradients.add(sublayer, 'second', kept.z, dy)
        self._do_later(part, partial(gradients.add, sublayer, 'first', kept.h_BSD, d_first))
        if was_early:
            self._do_one(part)
        yield
        return dh

    def _turn_back(
        self,
        pending: Pending | None,
        sublayer: SublayerSteps | None,
        dx: Box,
        gradients: Gradients,
        output: Box | None = None,
    ) -> tuple[Box, Box]:
        """Return the gradients of the residual stream and of the term added by `sublayer`."""
        turned = pending.sublayer if pending else sublayer
        assert turned is not None

        def step(dx_BTD: jax.Array, *sent: Any) -> Sequence[Any]:
            vectors, rest = list[Sublayer](), [*sent]
            if pending:
                enter, dh_BTD, *rest = sent
                of_norm, entered_BTD = enter(dh_BTD)
                dx_BTD, vectors = dx_BTD + entered_BTD, [of_norm]
            if sublayer is None:
                return dx_BTD, *vectors
            dy_BTD, of_leave = sublayer.gradient_of_leave(dx_BTD, *rest)
            return dx_BTD, *vectors, of_leave, dy_BTD

        sent = [pending.enter, pending.dh_BTD] if pending else []
        sent += [output] if output is not None and sublayer and sublayer.keeps_output else []
        dx, *results = self.clock.ticks(turned.scope, step, dx, *sent)
        if pending:
            gradients.add_vectors(pending.sublayer, results.pop(0))
        if sublayer is None:
            return dx, dx
        of_leave, dy = results
        gradients.add_vectors(sublayer, of_leave)
        return dx, dy

    def _together(
        self, part: int, sublayer: SublayerSteps, step: Callable[..., Sequence[Any]], *boxes: Box
    ) -> Generator[None, None, list[Box]]:
        """Run a step of this part or, if the parts meet in this step, of all parts."""
        run = partial(self.clock.ticks, sublayer.scope, step)
        if not (self._meets and sublayer.mixes_tokens):
            return run(*boxes)
        meeting = self._meetings[sublayer.place]
        if not meeting.is_last:
            self._early.add(part)
        return (yield from meeting.join(part, boxes, run, meanwhile=partial(self._do_one, part)))

    def _let_ahead(self, part: int, sublayer: SublayerSteps) -> Steps:
        """After a meeting, let the parts that arrived last send before the others."""
        was_early = part in self._early and sublayer.is_scattered
        self._early.discard(part)
        if was_early:
            self._do_one(part)
            yield
        return was_early

    def _do_later(self, part: int, step: Callable[[], None]) -> None:
        """Run a step that nothing waits for; if parts meet, run it while this part waits."""
        self._do_one(part)
        self._later[part] = step
        if not self._meets:
            self._do_one(part)

    def _do_one(self, part: int) -> None:
        if part in self._later:
            self._later.pop(part)()


def _turn(
    sublayer: SublayerSteps, after: SublayerSteps | None, x_BTD: jax.Array, y_BTD: jax.Array
) -> Sequence[Any]:
    """Leave a sublayer and enter the one after it."""
    x_BTD = sublayer.leave(x_BTD, y_BTD)
    return (x_BTD,) if after is None else (x_BTD, *after.enter(x_BTD))
