"""What runs while a collective is under way: the matrix products that the schedule puts between its start and its end."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from megajax.hlo.products import Product, flops, in_all, product_of
from megajax.hlo.program import Computation, HloError, Instruction, Program

Place = tuple[str, str]  # the names of a collective's computation and instruction


class Span(NamedTuple):
    """A collective in the background: the computation that starts it, and where in its order."""

    home: Computation
    begin: int
    end: int


class Sent(NamedTuple):
    """The link that a collective crosses, and the seconds that its bytes take there."""

    link: str
    seconds: float


def overlap(program: Program, computation: Computation, start: Instruction) -> tuple[bool, int]:
    """Whether it is synchronous, and the FLOPs of the matrix products scheduled between its start and its end."""
    found = span(program, computation, start)
    if found is None:
        return True, 0
    between = found.home.instructions[found.begin + 1 : found.end]
    return False, sum(flops(program, found.home, one) for one in between)


def span(program: Program, computation: Computation, start: Instruction) -> Span | None:
    """Where a collective starts and ends; None where it is synchronous."""
    home, first = computation, start
    for caller, one in program.callers.get(computation.name, ()):
        if one.opcode == 'async-start':
            home, first = caller, one
    if not first.opcode.endswith('-start') or '"is_sync":true' in first.attributes:
        return None
    order = home.instructions
    readers = (i for i, one in enumerate(order) if first.name in one.operands)
    end = next((i for i in readers if order[i].opcode.endswith('-done')), None)
    if end is None:
        raise HloError(f'no end of {first.name}: {first.line}')
    return Span(home, order.index(first), end)


def hidden_seconds(
    program: Program,
    sent: Mapping[Place, Sent],
    seconds_of: Callable[[Product], float],
) -> dict[Place, float]:
    """The seconds of each collective's transfer that lie beside matrix products, each time it runs.

    One wire serves the transfers of a link in the order of their start, and a second of a product
    is spent once per link: on the first transfer in flight until that is done, then on the next.
    What a loop's own transfers leave of its products, in all its iterations, is there for those in
    flight around the loop.
    """
    walk = _Walk(program, sent, seconds_of)
    walk.unspent(program.entry)
    return walk.hidden


class _Walk:
    """The walk of `hidden_seconds`; each computation is walked once, whoever calls it."""

    def __init__(
        self,
        program: Program,
        sent: Mapping[Place, Sent],
        seconds_of: Callable[[Product], float],
    ):
        self.program, self.sent, self.seconds_of = program, sent, seconds_of
        self.hidden = dict.fromkeys(sent, 0.0)
        self.links = dict.fromkeys(one.link for one in sent.values())
        self.left: dict[str, dict[str, float]] = {}

    @cached_property
    def in_order(self) -> dict[str, dict[int, list[tuple[Place, bool]]]]:
        """By computation and place in its order, the transfers there, and whether they start."""
        found = defaultdict[str, dict[int, list[tuple[Place, bool]]]](lambda: defaultdict(list))
        for place in self.sent:
            computation = self.program.computations[place[0]]
            if under_way := span(self.program, computation, computation.by_name[place[1]]):
                found[under_way.home.name][under_way.begin].append((place, True))
                found[under_way.home.name][under_way.end].append((place, False))
        return found

    def unspent(self, computation: Computation) -> dict[str, float]:
        """Seconds of products in one run of a computation that hid nothing there, by link."""
        if computation.name in self.left:
            return self.left[computation.name]
        left = self.left[computation.name] = dict.fromkeys(self.links, 0.0)
        in_flight: dict[str, list[Place]] = {link: [] for link in self.links}
        for index, instruction in enumerate(computation.instructions):
            for place, starts in self.in_order.get(computation.name, {}).get(index, ()):
                queue = in_flight[self.sent[place].link]
                if starts:
                    queue.append(place)
                elif place in queue:  # done, as are those that the wire served before it
                    del queue[: queue.index(place) + 1]
            for link, seconds in self._spendable(computation, instruction).items():
                left[link] += self._spend(in_flight[link], seconds)
        return left

    def _spendable(self, computation: Computation, instruction: Instruction) -> dict[str, float]:
        if product := product_of(computation, instruction):
            return dict.fromkeys(self.links, self.seconds_of(product))
        inside = [self.unspent(self.program.computations[name]) for name in instruction.called]
        return {link: in_all(instruction, [one[link] for one in inside]) for link in self.links}

    def _spend(self, queue: list[Place], seconds: float) -> float:
        """Hide the transfers in the queue, the first first; what is left of the seconds."""
        for place in queue:
            taken = min(seconds, self.sent[place].seconds - self.hidden[place])
            self.hidden[place] += taken
            seconds -= taken
        return seconds
