"""Permutes that lose data: a device that no pair of a collective-permute names as a target gets zeros."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from megajax.hlo.groups import Groups

Pairs = Sequence[tuple[int, int]]
SHOWN = 8  # devices or pairs that a message names


def fault(pairs: Groups, num_devices: int) -> tuple[str, str] | None:
    """A name for what is wrong with a permute, and a sentence with its devices; None where every device has one source."""
    if not pairs:
        return 'permute without pairs', 'it has no pairs, so every device gets zeros'
    for what, place in (('source', 0), ('target', 1)):
        if twice := sorted(device for device, count in Counter(pair[place] for pair in pairs).items() if count > 1):
            return f'permute with a {what} twice', f'{listed(twice)} {_are(twice)} the {what} of more than one pair'
    if without := sorted({*range(num_devices)} - {target for _, target in pairs}):
        return 'permute without a source', f'{listed(without)} {_are(without)} without a source and {_get(without)} zeros'
    return None


def along(pairs: Pairs | str, axes: Sequence[str], mesh: Mapping[str, int]) -> list[frozenset[tuple[int, ...]]]:
    """The pairs of devices that a declaration allows: positions along axes, 'chain' or 'ring' (in either direction)."""
    names = [*mesh]
    devices = np.arange(prod(mesh.values())).reshape([*mesh.values()])
    size = prod(mesh[axis] for axis in axes)
    rows = np.moveaxis(devices, [names.index(axis) for axis in axes], range(-len(axes), 0)).reshape(-1, size).tolist()
    ring = [(place, (place + 1) % size) for place in range(size)]
    choices: dict[str, list[Pairs]] = {'chain': [ring[:-1]], 'ring': [ring, [(target, source) for source, target in ring]]}
    allowed = choices[pairs] if isinstance(pairs, str) else [pairs]
    return [frozenset((row[source], row[target]) for row in rows for source, target in one) for one in allowed]


def listed(devices: Sequence[int]) -> str:
    """Devices by number: `devices 0, 4`."""
    shown = ', '.join(map(str, devices[:SHOWN])) + (f' and {len(devices) - SHOWN} more' if len(devices) > SHOWN else '')
    return f'device{"s" if len(devices) > 1 else ""} {shown}'


def _are(devices: Sequence[int]) -> str:
    return 'are' if len(devices) > 1 else 'is'


def _get(devices: Sequence[int]) -> str:
    return 'get' if len(devices) > 1 else 'gets'
