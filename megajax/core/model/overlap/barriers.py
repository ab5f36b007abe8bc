"""Order the steps of a program with barriers, so that XLA's scheduler keeps the order.

XLA may run operations that do not depend on each other in any order. It starts a collective as
early as it can, but it is then a matter of luck which matmuls are left to overlap with it. Here, a
barrier makes each step depend on the previous step. A collective is not a step: it starts after the
latest step, and ends before the first step that reads its result.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax
from jax import lax


class Box:
    """A value that barriers replace by copies; a step that reads a later copy runs later."""

    def __init__(self, value: Any):
        self.value = value


Steps = Generator[None, None, Any]  # a generator that yields where it has just started a collective


class Clock:
    """Runs steps one at a time; `scope` is the name of a step in the compiled program."""

    def __init__(self) -> None:
        self._last: list[Box] = []

    def tick(self, scope: str, step: Callable[..., Any], *boxes: Box) -> Box:
        """Run a step after the previous one."""
        (result,) = self.ticks(scope, lambda *values: (step(*values),), *boxes)
        return result

    def ticks(self, scope: str, step: Callable[..., Sequence[Any]], *boxes: Box) -> list[Box]:
        """Run a step with several results; the next step comes after all of them."""
        with jax.named_scope(scope):
            self._wait(boxes)
            values = step(*(box.value for box in boxes))
        once = {id(value): Box(value) for value in values}
        results = [once[id(value)] for value in values]
        self._last = results
        return results

    def send(self, scope: str, collective: Callable[[Any], Any], box: Box) -> Box:
        """Start a collective after the latest step."""
        with jax.named_scope(scope):
            self._wait([box])
            return Box(collective(box.value))

    def wait(self, scope: str, box: Box) -> None:
        """Make the next step wait for a collective whose result it does not read."""
        with jax.named_scope(scope):
            self._wait([box])

    def _wait(self, boxes: Sequence[Box]) -> None:
        every = list({id(box): box for box in [*boxes, *self._last]}.values())
        values = lax.optimization_barrier([box.value for box in every])
        for box, value in zip(every, values, strict=True):
            box.value = value


class Meeting:
    """A step that several generators share; it runs when the last of them has arrived."""

    def __init__(self, size: int):
        self._size = size
        self._boxes: dict[int, Sequence[Box]] = {}
        self._results: list[Box] = []

    @property
    def is_last(self) -> bool:
        """Whether all generators except one have arrived."""
        return len(self._boxes) == self._size - 1

    def join(
        self,
        index: int,
        boxes: Sequence[Box],
        step: Callable[..., list[Box]],
        meanwhile: Callable[[], None],
    ) -> Generator[None, None, list[Box]]:
        """Add the boxes of generator `index`; return the results of `step` on all boxes.

        Until the last generator has arrived, call `meanwhile` and yield.
        """
        is_last = self.is_last
        self._boxes[index] = boxes
        if is_last:
            every = [box for _, boxes in sorted(self._boxes.items()) for box in boxes]
            self._results, self._boxes = step(*every), {}
        else:
            self._results = []
            while not self._results:
                meanwhile()
                yield
        return self._results


def in_turn(parts: Iterable[Steps]) -> list[Any]:
    """Alternate between generators, each running to its next `yield`; return their results.

    Each generator starts one turn after the previous one, so that their collectives do not
    coincide.
    """
    waiting, running = deque(enumerate(parts)), list[tuple[int, Steps]]()
    results: dict[int, Any] = {}
    while waiting or running:
        if waiting:
            running.append(waiting.popleft())
        for index, steps in [*running]:
            try:
                next(steps)
            except StopIteration as end:
                results[index] = end.value
                running.remove((index, steps))
    return [results[index] for index in sorted(results)]
