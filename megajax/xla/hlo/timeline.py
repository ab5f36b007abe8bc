"""Time a compiled program by its schedule: one stream of kernels, and one wire for each link.

A kernel starts after the kernel before it. A transfer starts as soon as the program has started it
and its wire is free. The program waits for the transfer's end before it reads the result. Latencies
are not counted, and kernels and transfers do not slow each other down.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.hlo.schedule import Place, Sent, launch_of, span


class Timeline(NamedTuple):
    """The seconds of a program's kernels, and the seconds that it waits for transfers."""

    compute: float
    exposed: float


def timeline(
    program: Program, sent: Mapping[Place, Sent], kernel_seconds: Mapping[Place, float]
) -> Timeline:
    """Compute the timeline of a program that sends `sent`, from the seconds of its kernels."""
    walk = _Walk(program, sent, kernel_seconds)
    walk.run(program.entry)
    return Timeline(walk.seconds[COMPUTE], walk.seconds[NOW] - walk.seconds[COMPUTE])


NOW, COMPUTE = 'now', 'compute'  # not names of links


class _Walk:
    """The walk of `timeline` in the order of the schedule.

    `seconds` has the time since the start, the seconds of kernels so far, and the time from which
    the wire of each link is free.
    """

    def __init__(
        self,
        program: Program,
        sent: Mapping[Place, Sent],
        kernel_seconds: Mapping[Place, float],
    ):
        self.program, self.sent, self.kernel_seconds = program, sent, kernel_seconds
        self.seconds = defaultdict[str, float](float)
        self.starts = defaultdict[str, dict[int, list[Place]]](lambda: defaultdict(list))
        self.ends = defaultdict[str, dict[int, list[Place]]](lambda: defaultdict(list))
        self.synchronous = defaultdict[Place, list[Sent]](list)  # by what executes them
        for place in sent:
            computation = program.computations[place[0]]
            instruction = computation.by_name[place[1]]
            if under_way := span(program, computation, instruction):
                self.starts[under_way.home.name][under_way.begin].append(place)
                self.ends[under_way.home.name][under_way.end].append(place)
            else:
                home, launch = launch_of(program, computation, instruction)
                self.synchronous[home.name, launch.name].append(sent[place])

    def run(self, computation: Computation) -> None:
        """Run the instructions of a computation once."""
        done: dict[Place, float] = {}
        for index, instruction in enumerate(computation.instructions):
            for place in self.starts[computation.name].get(index, ()):
                done[place] = self._send(self.sent[place])
            for place in self.ends[computation.name].get(index, ()):
                self.seconds[NOW] = max(self.seconds[NOW], done[place])
            self._run(computation, instruction, is_sent=index in self.starts[computation.name])

    def _run(self, computation: Computation, instruction: Instruction, *, is_sent: bool) -> None:
        place = computation.name, instruction.name
        if is_sent:
            return
        if place in self.synchronous:
            for transfer in self.synchronous[place]:
                self.seconds[NOW] = self._send(transfer)
        elif instruction.opcode == 'while':
            self._loop(instruction)
        elif instruction.opcode in ('call', 'conditional'):
            self._longest([self.program.computations[name] for name in instruction.called])
        elif place in self.kernel_seconds:
            seconds = self.kernel_seconds[place]
            self.seconds[NOW] += seconds
            self.seconds[COMPUTE] += seconds

    def _send(self, transfer: Sent) -> float:
        """Return when a transfer that starts now will have ended."""
        begin = max(self.seconds[NOW], self.seconds[transfer.link])
        self.seconds[transfer.link] = begin + transfer.seconds
        return self.seconds[transfer.link]

    def _loop(self, instruction: Instruction) -> None:
        """Run the body of a loop twice; all further runs take as long as the second one."""
        body, steps = instruction.attribute('body'), instruction.trip_count
        times = 1 if steps is None else steps
        assert body is not None
        for _ in range(min(times, 2)):
            before = dict(self.seconds)
            self.run(self.program.computations[body])
        for name in self.seconds if times > 2 else ():
            self.seconds[name] += (times - 2) * (self.seconds[name] - before.get(name, 0.0))

    def _longest(self, branches: list[Computation]) -> None:
        """Run each of the computations from here, and continue after the one that takes longest."""
        before, ends = dict(self.seconds), []
        for branch in branches:
            self.seconds = defaultdict(float, before)
            self.run(branch)
            ends.append(self.seconds)
        self.seconds = max(ends, key=lambda seconds: seconds[NOW])
