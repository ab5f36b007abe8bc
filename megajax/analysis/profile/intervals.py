"""The time of one device in one step, divided among its events.

At each moment, the running kernels share the time equally. A transfer gets a share only at moments
when no kernel runs, because only then is it exposed. When nothing runs, the device is idle.
Therefore all shares and the idle time add up to the step.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megajax.analysis.profile.trace import Event, Window


class Timed(NamedTuple):
    """An event within a step: its duration and its share of the step, in seconds."""

    name: str
    seconds: float
    share: float


class Idle(NamedTuple):
    """Seconds in which a device does nothing: before its first event, between events, and after."""

    before: float
    between: float
    after: float


class Divided(NamedTuple):
    """One device in one step: the step's length, the events ordered by start, and idle seconds."""

    seconds: float
    events: list[Timed]
    idle: Idle


def divide(events: Iterable[Event], window: Window, is_transfer: Callable[[str], bool]) -> Divided:
    """Divide a step among the events of a device that overlap with it."""
    inside = sorted(
        (max(event.start, window.start), min(event.end, window.end), event.name)
        for event in events
        if event.end > window.start and event.start < window.end
    )
    edges = sorted(
        (moment, ends, place)
        for place, (start, end, _) in enumerate(inside)
        for moment, ends in ((start, False), (end, True))
    )
    sends = [is_transfer(name) for _, _, name in inside]
    shares, between = [0.0] * len(inside), 0.0
    kernels, transfers = set[int](), set[int]()
    last = edges[0][0] if edges else window.end
    for moment, ends, place in edges:
        running = kernels or transfers
        for each in running:
            shares[each] += (moment - last) / len(running)
        between += 0.0 if running else moment - last
        last = moment
        group = transfers if sends[place] else kernels
        (group.discard if ends else group.add)(place)
    timed = [
        Timed(name, end - start, share)
        for (start, end, name), share in zip(inside, shares, strict=True)
    ]
    first = edges[0][0] if edges else window.end
    idle = Idle(first - window.start, between, window.end - last)
    return Divided(window.end - window.start, timed, idle)
