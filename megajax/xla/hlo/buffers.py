"""Find the arrays in a program's temporary memory at its peak.

XLA dumps the addresses and lifetimes of all arrays to text files if compiler options ask for it
(`megajax.xla.hlo.dump`). Arrays that share an address, such as in-place updates, count once.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from megajax.xla.hlo.errors import HloError

_RANGE = re.compile(r'^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$', re.MULTILINE)
_MOMENT = re.compile(r'^    (\d+):(\S+)$', re.MULTILINE)
_VALUE = re.compile(
    r' value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> '
    r'\(size=(\d+),offset=(\d+)\): (\w+\[[^\]]*\]|\()'
)
_VALUES = re.compile(
    r'^<\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+>\n positions:\n((?:  .*\n)+)',
    re.MULTILINE,
)
_PLACE = re.compile(r'^  ([\w.\-]+)(?: \{([\d,]*)\})?$', re.MULTILINE)


Name = tuple[str, str]  # an instruction, and the index in its tuple, such as `3`, or nothing


class Buffer(NamedTuple):
    """An array in temporary memory."""

    # The instruction that defines the array, then other instructions that return it.
    names: tuple[Name, ...]
    array: str  # dtype and shape on a device; `tuple` for the addresses of several arrays
    bytes: int
    last: str  # the last instruction that uses it


class _Assigned(NamedTuple):
    name: Name
    array: str
    allocation: int
    start: int
    end: int


def buffers_at_peak(folder: Path) -> tuple[Buffer, ...]:
    """Return the arrays in temporary memory at its peak, from XLA's dump.

    Their bytes add up to the memory in use; the rest of the temporary memory is between them.
    """
    kinds = 'live-range', 'buffer-assignment', 'buffer-assignment-values'
    return at_peak(*(_last(folder, kind) for kind in kinds))


def at_peak(live_ranges: str, assignment: str, values: str) -> tuple[Buffer, ...]:
    """Do the same as `buffers_at_peak`, from the contents of the three files."""
    lives = {
        (name, index): (int(first), int(last))
        for name, index, first, last in _RANGE.findall(live_ranges)
    }
    moments = {int(number): name for number, name in _MOMENT.findall(live_ranges)}
    assigned = [*_assigned(assignment)]
    if missing := [each.name[0] for each in assigned if each.name not in lives]:
        raise HloError(f'the live ranges do not include {missing[0]}, which occupies memory')
    places = {
        (name, index): tuple(_PLACE.findall(lines))
        for name, index, lines in _VALUES.findall(values)
    }
    held = _most([(each, *lives[each.name]) for each in assigned])
    return tuple(
        Buffer(places[each.name], each.array, size, moments.get(lives[each.name][1], ''))
        for each, size in held
    )


def _last(folder: Path, kind: str) -> str:
    """Return the contents of the file of a kind; of the last file if the program compiled twice."""
    found = sorted(folder.glob(f'*-{kind}.txt'))
    if not found:
        raise HloError(f'XLA wrote no file of the kind {kind} for a program')
    return found[-1].read_text()


def _assigned(text: str) -> Iterator[_Assigned]:
    for number, block in enumerate(re.split(r'^allocation ', text, flags=re.MULTILINE)):
        head, *lines = block.split('\n')
        if 'preallocated-temp' not in head:
            continue
        for line in lines:
            if match := _VALUE.match(line):
                name, index, size, offset, array = match.groups()
                start = int(offset)
                array = array.replace('(', 'tuple')
                yield _Assigned((name, index or ''), array, number, start, start + int(size))
            elif line.startswith(' value:'):
                raise HloError(f'not an array with an address: {line.strip()}')


def _most(lives: Sequence[tuple[_Assigned, int, int]]) -> list[tuple[_Assigned, int]]:
    """Return the arrays that are live when most addresses are in use, with their bytes."""
    changes = [0] * (max((last for *_, last in lives), default=0) + 2)
    for each, first, last in lives:
        changes[first] += each.end - each.start
        changes[last + 1] -= each.end - each.start
    at_most = [*accumulate(changes)]  # more than is in use if arrays share an address
    most, held = 0, list[tuple[_Assigned, int]]()
    for moment in sorted(range(len(at_most)), key=lambda moment: -at_most[moment]):
        if at_most[moment] <= most:
            break
        alive = _apart([each for each, first, last in lives if first <= moment <= last])
        if (in_use := sum(size for _, size in alive)) > most:
            most, held = in_use, alive
    return held


def _apart(alive: list[_Assigned]) -> list[tuple[_Assigned, int]]:
    """Return each array with the bytes that no array before it has: each address counts once."""
    apart, reached = list[tuple[_Assigned, int]](), (-1, 0)
    for each in sorted(alive, key=lambda each: (each.allocation, each.start, -each.end)):
        start = max(each.start, reached[1]) if each.allocation == reached[0] else each.start
        if each.end > start:
            apart.append((each, each.end - start))
            reached = each.allocation, each.end
    return apart
