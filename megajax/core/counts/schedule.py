"""The schedule of a pipeline: which passes each stage runs in each tick (Narayanan et al., 2021).

All stages run the same program in lock step. In a tick, a stage runs at most one forward pass and
one backward pass, each of one chunk of its layers. The output is the neighbor's input in the next
tick. Between the two passes of a chunk, a slot stores the values that the backward pass needs.
Imports no jax.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megajax.core.config.schema import Config
from megajax.core.counts.runs import num_passes

IDLE = -1
Table = NDArray[np.int32]


class Phase(NamedTuple):
    """Consecutive ticks with the same kinds of passes."""

    start: int  # the first tick
    stop: int
    forward: bool
    head: bool  # whether a tick may compute the head and its backward pass
    backward: bool

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The passes of a training step on a pipeline.

    `forward` and `backward` [tick, stage, 3] have the microbatch, the chunk and the slot of each
    pass, or IDLE. The head follows the last chunk's forward pass in the same tick; `head` [tick]
    has its microbatch or IDLE. The gradient of the head's input then waits for the last chunk's
    backward pass, in one of `num_turns` slots: the index of the microbatch modulo `num_turns`.
    """

    stages: int
    chunks: int
    microbatches: int
    forward: Table
    backward: Table
    head: NDArray[np.int32]
    num_slots: int
    num_turns: int
    phases: tuple[Phase, ...]

    @property
    def passes(self) -> int:
        """The number of ticks with a forward pass on some stage; as many have a backward pass."""
        return num_passes(self.stages, self.chunks, self.microbatches)

    @property
    def bubble(self) -> float:
        """The ratio of a stage's idle time to its busy time.

        It assumes that all chunks take the same time, and that idle ticks take as long as busy
        ones.
        """
        return self.passes / (self.chunks * self.microbatches) - 1


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of a config's training step."""
    mesh, train = config.mesh, config.train
    return make_schedule(
        mesh.stages, mesh.virtual_stages, train.microbatches, gpipe=train.schedule == 'gpipe'
    )


@functools.cache
def make_schedule(stages: int, chunks: int, microbatches: int, *, gpipe: bool = False) -> Schedule:
    """Make the schedule of 1F1B, interleaved if a stage has several chunks, or of GPipe.

    With several chunks, groups of as many microbatches as there are stages go through all chunks;
    the last group may be smaller. In 1F1B the first backward pass is in the tick of the first head,
    and at most `stages * (chunks + 1) - 1` chunks are in flight. In GPipe (Huang et al., 2019), the
    first backward pass comes after the last forward pass, and all chunks are in flight.
    """
    order = list(_order(stages, chunks, microbatches))
    ticks = len(order) + stages - 1  # number of ticks with a forward pass
    first_head = chunks * stages - 1
    turn = ticks if gpipe else first_head  # the tick of the first backward pass
    forward = np.full((turn + ticks, stages, 3), IDLE, np.int32)
    backward = np.full_like(forward, IDLE)
    for stage in range(stages):
        for place, (microbatch, chunk) in enumerate(order):
            if microbatch < microbatches:
                forward[place + stage, stage, :2] = microbatch, chunk
                tick = turn + place + stages - 1 - stage
                backward[tick, stage, :2] = microbatch, chunks - 1 - chunk
    last = forward[:, -1]
    head = np.where(last[:, 1] == chunks - 1, last[:, 0], IDLE).astype(np.int32)
    return Schedule(
        stages,
        chunks,
        microbatches,
        forward,
        backward,
        head,
        num_slots=_assign_slots(forward, backward),
        num_turns=microbatches if gpipe else 1,
        phases=tuple(_phases(first_head, ticks, turn)),
    )


def _order(stages: int, chunks: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Yield the microbatch, which may not exist, and the chunk of each pass of a stage."""
    if chunks == 1:
        yield from ((microbatch, 0) for microbatch in range(microbatches))
        return
    for first in range(0, microbatches, stages):
        for chunk in range(chunks):
            yield from ((first + i, chunk) for i in range(stages))


def _phases(first_head: int, ticks: int, turn: int) -> Iterator[Phase]:
    """Yield the phases of a schedule whose forward passes take `ticks`, in order."""
    borders = sorted({0, first_head, ticks, turn, turn + ticks})
    for start, stop in itertools.pairwise(borders):
        is_forward = stop <= ticks
        yield Phase(start, stop, is_forward, is_forward and start >= first_head, start >= turn)


def _assign_slots(forward: Table, backward: Table) -> int:
    """Assign the first free slot to each pass; return the number of slots.

    A slot is free again in the tick after its backward pass.
    """
    used = 0
    for stage in range(forward.shape[1]):
        free: list[int] = []
        slot_of: dict[tuple[int, int], int] = {}
        count = 0
        for tick in range(len(forward)):
            microbatch, chunk, _ = map(int, forward[tick, stage])
            if microbatch != IDLE:
                if not free:
                    free.append(count)
                    count += 1
                slot_of[microbatch, chunk] = forward[tick, stage, 2] = free.pop(0)
            microbatch, chunk, _ = map(int, backward[tick, stage])
            if microbatch != IDLE:
                backward[tick, stage, 2] = slot_of.pop((microbatch, chunk))
                free.append(int(backward[tick, stage, 2]))
        assert not slot_of
        used = max(used, count)
    return used
