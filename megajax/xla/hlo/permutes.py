"""Find collective-permutes that lose data: a device that is not a target of a pair gets zeros."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from megajax.xla.hlo.groups import Groups

Pairs = Sequence[tuple[int, int]]
DevicePairs = frozenset[tuple[int, ...]]
SHOWN = 8  # maximum number of devices or pairs in a message


def fault(pairs: Groups, num_devices: int) -> tuple[str, str] | None:
    """Describe the fault of a permute: its name, and a sentence that lists the devices.

    Return None if every device has one source.
    """
    if not pairs:
        return 'permute without pairs', 'it has no pairs, so every device gets zeros'
    for role, place in (('source', 0), ('target', 1)):
        counts = Counter(pair[place] for pair in pairs)
        if repeated := sorted(device for device, count in counts.items() if count > 1):
            sentence = f'{_listed(repeated, "is", "are")} the {role} of more than one pair'
            return f'permute with a {role} twice', sentence
    if without := sorted({*range(num_devices)} - {target for _, target in pairs}):
        ends = 'has no source and gets zeros', 'have no source and get zeros'
        return 'permute without a source', _listed(without, *ends)
    return None


def along(pairs: Pairs | str, axes: Sequence[str], mesh: Mapping[str, int]) -> list[DevicePairs]:
    """Return the pairs of devices that a declaration allows; a ring may go in either direction."""
    names = [*mesh]
    devices = np.arange(prod(mesh.values())).reshape([*mesh.values()])
    size = prod(mesh[axis] for axis in axes)
    dims = [names.index(axis) for axis in axes]
    rows = np.moveaxis(devices, dims, range(-len(axes), 0)).reshape(-1, size).tolist()
    ring = [(place, (place + 1) % size) for place in range(size)]
    back = [(target, source) for source, target in ring]
    choices: dict[str, list[Pairs]] = {'chain': [ring[:-1]], 'ring': [ring, back]}
    return [
        frozenset((row[source], row[target]) for row in rows for source, target in choice)
        for choice in (choices[pairs] if isinstance(pairs, str) else [pairs])
    ]


def _listed(devices: Sequence[int], one: str, many: str) -> str:
    """Return a clause such as `devices 0, 4 have no source`, with the predicate `one` or `many`."""
    shown = ', '.join(map(str, devices[:SHOWN]))
    rest = f' and {len(devices) - SHOWN} more' if len(devices) > SHOWN else ''
    return f'devices {shown}{rest} {many}' if len(devices) > 1 else f'device {shown} {one}'
