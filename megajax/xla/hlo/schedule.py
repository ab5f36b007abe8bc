"""Find the overlap of collectives with the matmuls between their start and their end."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.products import Product, flops, in_all, product_of
from megajax.xla.hlo.program import Computation, Instruction, Program

Place = tuple[str, str]  # the names of a collective's computation and instruction


class Span(NamedTuple):
    """An asynchronous collective: its computation, and the indices of its start and its end."""

    home: Computation
    begin: int
    end: int


class Sent(NamedTuple):
    """The link that a collective crosses, and the seconds that its bytes take on it."""

    link: str
    seconds: float


def overlap(program: Program, computation: Computation, start: Instruction) -> tuple[bool, int]:
    """Return whether a collective is synchronous, and the FLOPs of matmuls that overlap with it.

    The overlapping matmuls are those that are scheduled between its start and its end.
    """
    under_way = span(program, computation, start)
    if under_way is None:
        return True, 0
    home, begin, end = under_way
    between = home.instructions[begin + 1 : end]
    return False, sum(flops(program, home, instruction) for instruction in between)


def span(program: Program, computation: Computation, start: Instruction) -> Span | None:
    """Find where a collective starts and ends; return None if it is synchronous."""
    home, first = launch_of(program, computation, start)
    if not first.opcode.endswith('-start') or '"is_sync":true' in first.attributes:
        return None
    end = _end_of(home, first)
    return Span(home, home.place_of[first.name], home.place_of[end.name])


def launch_of(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[Computation, Instruction]:
    """Return the fusion or start that executes an instruction, or the instruction, and its home."""
    home, first = computation, instruction
    while callers := [each for each in program.callers.get(home.name, ()) if _launches(each[1])]:
        home, first = callers[-1]
    return home, first


def _launches(caller: Instruction) -> bool:
    return caller.opcode in ('fusion', 'fusion-start', 'async-start')


def _end_of(home: Computation, start: Instruction) -> Instruction:
    """Return the instruction that ends a collective, directly or after updates of it."""
    ahead: Instruction | None = start
    while ahead:
        readers = home.users.get(ahead.name, [])
        if done := next((each for each in readers if each.opcode.endswith('-done')), None):
            return done
        ahead = next((each for each in readers if each.opcode.endswith('-update')), None)
    raise HloError(f'no end of {start.name}: {start.line}')


def hidden_seconds(
    program: Program,
    sent: Mapping[Place, Sent],
    seconds_of: Callable[[Product], float],
) -> dict[Place, float]:
    """Return the seconds of each collective's transfer that matmuls hide, per execution.

    A link serves its transfers one at a time, in the order of their start. A matmul hides one
    transfer per link at a time: the first one in flight until it ends, then the next. If a loop's
    matmul time hides none of the loop's own transfers, it can hide transfers that are in flight
    around the loop.
    """
    walk = _Walk(program, sent, seconds_of)
    walk.unspent(program.entry)
    return walk.hidden


class _Walk:
    """The walk of `hidden_seconds`, which visits each computation only once."""

    def __init__(
        self,
        program: Program,
        sent: Mapping[Place, Sent],
        seconds_of: Callable[[Product], float],
    ):
        self.program, self.sent, self.seconds_of = program, sent, seconds_of
        self.hidden = dict.fromkeys(sent, 0.0)
        self.links = dict.fromkeys(transfer.link for transfer in sent.values())
        self.left: dict[str, dict[str, float]] = {}

    @cached_property
    def in_order(self) -> dict[str, dict[int, list[tuple[Place, bool]]]]:
        """The transfers that start (True) or end (False), by computation and index in its order."""
        events = defaultdict[str, dict[int, list[tuple[Place, bool]]]](lambda: defaultdict(list))
        for place in self.sent:
            computation = self.program.computations[place[0]]
            if under_way := span(self.program, computation, computation.by_name[place[1]]):
                events[under_way.home.name][under_way.begin].append((place, True))
                events[under_way.home.name][under_way.end].append((place, False))
        return events

    def unspent(self, computation: Computation) -> dict[str, float]:
        """Return by link the seconds of a computation's matmuls that hide no transfer in it."""
        if computation.name in self.left:
            return self.left[computation.name]
        left = self.left[computation.name] = dict.fromkeys(self.links, 0.0)
        in_flight: dict[str, list[Place]] = {link: [] for link in self.links}
        for index, instruction in enumerate(computation.instructions):
            for place, starts in self.in_order.get(computation.name, {}).get(index, ()):
                queue = in_flight[self.sent[place].link]
                if starts:
                    queue.append(place)
                # The transfer has ended, as have the transfers before it on the same link.
                elif place in queue:
                    del queue[: queue.index(place) + 1]
            for link, seconds in self._spendable(computation, instruction).items():
                left[link] += self._spend(in_flight[link], seconds)
        return left

    def _spendable(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        if product := product_of(computation, instruction):
            return dict.fromkeys(self.links, self.seconds_of(product))
        inside = [self.unspent(self.program.computations[name]) for name in instruction.called]
        return {link: in_all(instruction, [left[link] for left in inside]) for link in self.links}

    def _spend(self, queue: list[Place], seconds: float) -> float:
        """Hide the transfers in the queue in order; return the seconds that are left."""
        for place in queue:
            spent = min(seconds, self.sent[place].seconds - self.hidden[place])
            self.hidden[place] += spent
            seconds -= spent
        return seconds
