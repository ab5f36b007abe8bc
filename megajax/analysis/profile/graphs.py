"""Find the instruction that launched each kernel of a CUDA graph.

A trace names such a kernel after its graph (openxla/xprof#3070), and also gives the kernel's own
name. XLA's own kernels are named after the instruction that they were made for. Instructions with
the same work share one kernel, which has the name of one of them. The rest are library kernels,
copies and fills; they belong to the instructions that the schedule launches between the neighboring
kernels of XLA's own. If an instruction in a loop and one outside it share a kernel, they may be
confused.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from megajax.analysis.profile.trace import Event
from megajax.xla.hlo.launches import is_launched, launching
from megajax.xla.hlo.products import target_of
from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.hlo.starts import opcode_of
from megajax.xla.hlo.transfers import kind_of

_NAMES = re.compile(r', metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}|%[\w.\-]+')
_CALLS = 'while', 'conditional', 'call'
_KERNELS = {
    'cudnn': re.compile('cudnn|fmha'),
    'nccl': re.compile('nccl', re.IGNORECASE),
    'copy': re.compile('^memcpy', re.IGNORECASE),
    'fill': re.compile('^memset', re.IGNORECASE),
}


def is_graph(name: str) -> bool:
    """Return whether an event is a kernel in a CUDA graph, named after the graph."""
    return name.startswith('command_buffer')


class _Place(NamedTuple):
    computation: str
    number: int


class Schedule:
    """The instructions that the stream of a program launches, in order."""

    def __init__(self, program: Program):
        self._launched = {
            computation.name: [
                each
                for each in computation.instructions
                if is_launched(each) or each.opcode in _CALLS
            ]
            for computation in launching(program)
        }
        self._loops = {
            name
            for instructions in self._launched.values()
            for instruction in instructions
            if instruction.opcode == 'while'
            for name in instruction.called
        }
        self._in_order = {
            name: [_Place(name, index) for index in range(len(instructions))]
            for name, instructions in self._launched.items()
        }
        self._places = dict[str, _Place]()  # by instruction name
        self._work = dict[str, str]()  # by kernel name
        self._sharing = defaultdict[str, list[_Place]](list)  # by the computation of a fusion
        for name, instructions in self._launched.items():
            for place, instruction in zip(self._in_order[name], instructions, strict=True):
                self._places[instruction.name] = place
                if instruction.opcode == 'fusion':
                    work = _work(program, instruction)
                    self._sharing[work].append(place)
                    self._work[re.sub(r'[.\-]', '_', instruction.name)] = work

    def named(self, events: Iterable[Event]) -> list[Event]:
        """Name the kernels of graphs after their instructions, if these are found.

        `events` are the program's events on one device, from the beginning of a step.
        """
        events = sorted(events, key=lambda event: event.start)
        seen = {self._work[event.kernel] for event in events if event.kernel in self._work}
        own = {place for work in seen for place in self._sharing[work]}
        named, waiting, before = list[Event](), list[Event](), None
        for event in events:
            place = self._place(event, before)
            if place:
                named += _share_out(waiting, self._between(before, place, own))
                before, waiting = place, []
                event = event._replace(name=self._at(place).name)
            (waiting if is_graph(event.name) else named).append(event)
        return named + _share_out(waiting, self._between(before, None, own))

    def _place(self, event: Event, before: _Place | None) -> _Place | None:
        """Return the position of one of XLA's own kernels; None for any other event."""
        if not is_graph(event.name):
            place = self._places.get(event.name)
            is_kernel = place and kind_of(self._at(place)) is None
            return place if is_kernel else None
        if event.kernel not in self._work:
            return None
        sharing = self._sharing[self._work[event.kernel]]
        if before is None:
            return sharing[0]
        inside = [place for place in sharing if place.computation == before.computation]
        later = [place for place in inside if place.number > before.number]
        again = inside if before.computation in self._loops else []
        elsewhere = [place for place in sharing if place.computation != before.computation]
        return (later or again or elsewhere or inside)[0]

    def _between(
        self, before: _Place | None, after: _Place | None, own: set[_Place]
    ) -> Iterator[Instruction]:
        """Yield the instructions launched between two successive kernels of XLA's own."""

        def is_passed(place: _Place) -> bool:
            return place not in own and self._at(place).opcode not in _CALLS

        if before and after and before.computation == after.computation and before < after:
            inside = self._in_order[before.computation][before.number + 1 : after.number]
            yield from map(self._at, filter(is_passed, inside))
            return
        if before:
            rest = self._in_order[before.computation][before.number + 1 :]
            yield from map(self._at, takewhile(is_passed, rest))
        if after:
            ahead = reversed(self._in_order[after.computation][: after.number])
            yield from map(self._at, reversed([*takewhile(is_passed, ahead)]))

    def _at(self, place: _Place) -> Instruction:
        return self._launched[place.computation][place.number]


def _work(program: Program, instruction: Instruction) -> str:
    """Return a fusion's computation without names, equal for fusions that share a kernel."""
    (called,) = instruction.called
    inside = program.computations[called].instructions
    numbers = {each.name: str(number) for number, each in enumerate(inside)}
    return '\n'.join(
        ' '.join(
            (
                each.opcode,
                each.type,
                ','.join(numbers[name] for name in each.operands) or each.inputs,
                _NAMES.sub('', each.attributes),
            )
        )
        for each in inside
    )


def _share_out(kernels: Sequence[Event], calls: Iterable[Instruction]) -> list[Event]:
    """Name kernels after the calls that launch such kernels, and fills after the next kernel.

    A kernel that matches no call keeps its name.
    """
    calls, names = [*calls], dict[Event, str]()
    for kind in ('cudnn', 'nccl', 'copy', 'library'):
        some = [each for each in kernels if _kind(each.kernel) == kind]
        of_kind = [each.name for each in calls if _launches(each) == kind]
        names |= zip(some, _in_turn(len(some), of_kind), strict=bool(of_kind))
    name, found = None, list[Event]()
    for event in reversed(kernels):
        name = names.get(event, name if _kind(event.kernel) == 'fill' else None)
        found.append(event._replace(name=name or event.name))
    return found


def _in_turn(count: int, names: Sequence[str]) -> list[str]:
    """Assign `count` kernels to calls, equally many to each; the last call gets the remainder."""
    if not names:
        return []
    each = max(1, count // len(names))
    return [names[min(place // each, len(names) - 1)] for place in range(count)]


def _kind(kernel: str) -> str:
    return next((kind for kind, pattern in _KERNELS.items() if pattern.search(kernel)), 'library')


def _launches(instruction: Instruction) -> str:
    if kind_of(instruction):
        return 'nccl'
    if opcode_of(instruction) != 'custom-call':
        return 'copy'
    return 'cudnn' if 'cudnn' in target_of(instruction) else 'library'
