"""Which devices a collective joins, in every spelling of XLA, and which mesh axes they lie along."""

import re
from collections.abc import Mapping
from itertools import combinations, pairwise
from math import prod

import numpy as np

from megajax.hlo.program import HloError, Instruction

Groups = tuple[tuple[int, ...], ...]


def device_groups(instruction: Instruction, num_devices: int) -> Groups:
    """The groups of devices, as places in the flattened mesh; for a collective-permute, its pairs of source and target."""
    text = instruction.attributes
    if found := re.search(r'source_target_pairs=\{(.*?)\}(?:,|$)(?! ?\{)', text):
        return _listed(found[1])
    if found := re.search(
        r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', text
    ):
        return _along_axes(found[1], found[2], found[3], instruction.line)
    if found := re.search(r'replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
        return _rows(_iota(found[2]).reshape(_numbers(found[1])))
    if found := re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', text):
        return _listed(found[1]) or (tuple(range(num_devices)),)
    raise HloError(f'no replica groups: {instruction.line}')


def groups_text(instruction: Instruction) -> str:
    """The groups or pairs as the text spells them."""
    found = re.search(
        r'(?:source_target_pairs|replica_groups)=(.*?)(?:, (?!device_ids)\w+=|$)',
        instruction.attributes,
    )
    return found[1] if found else ''


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest axes of the mesh that join every group: ('data',), ('data', 'model'), ...; () where each device is alone."""
    devices = np.arange(prod(mesh.values())).reshape([*mesh.values()])
    if not {device for group in groups for device in group} <= {*range(devices.size)}:
        raise HloError(f'groups {groups} name devices that the mesh {dict(mesh)} does not have')
    names = [*mesh]
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            along = (
                np.moveaxis(devices, [names.index(name) for name in chosen], range(-count, 0))
                if count
                else devices
            )
            rows = along.reshape(-1, prod(mesh[name] for name in chosen))
            row_of = {int(device): index for index, row in enumerate(rows) for device in row}
            if all(len({row_of[device] for device in group}) == 1 for group in groups):
                return chosen
    raise AssertionError('all axes together join all devices')


def crosses_hosts(groups: Groups, devices_per_host: int) -> bool:
    """Whether some group has devices of more than one host."""
    return any(len({device // devices_per_host for device in group}) > 1 for group in groups)


def _along_axes(sizes: str, device_ids: str | None, names: str, line: str) -> Groups:
    """Of mesh['a'=2,'b'=4] {'b'}; {'b':(2)2} is the part of b that has two places, after a part that has two."""
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    found = [re.fullmatch(r" ?'([^']+)'(?::\((\d+)\)(\d+))?", name) for name in names.split(',')]
    parts = [
        (one[1], int(one[2] or 1), int(one[3] or mesh[one[1]]))
        for one in found
        if one and one[1] in mesh
    ]
    if len(parts) < len(found):
        raise HloError(f'replica groups along axes that are not understood: {line}')
    shape, dims = list[int](), dict[tuple[str, int], int]()
    for name, size in mesh.items():
        cuts = {1, size} | {
            cut for axis, before, count in parts if axis == name for cut in (before, before * count)
        }
        for low, high in pairwise(sorted(cuts)):
            dims[name, low] = len(shape)
            shape.append(high // low)
    along = [
        dim
        for axis, before, count in parts
        for (name, low), dim in dims.items()
        if name == axis and before <= low < before * count
    ]
    devices = _iota(device_ids or f'[{prod(mesh.values())}]').reshape(shape)
    return _rows(
        np.moveaxis(devices, along, range(-len(along), 0)).reshape(
            -1, prod(shape[dim] for dim in along)
        )
    )


def _iota(text: str) -> np.ndarray:
    """The devices in the order that '[8]', '[2,4]T(1,0)' or a list of them gives."""
    found = re.fullmatch(r'(\[[\d,]+\])(?:T(\([\d,]+\)))?', text)
    if not found:
        return np.array(_numbers(text))
    shape = _numbers(found[1])
    return (
        np.arange(prod(shape))
        .reshape(shape)
        .transpose(_numbers(found[2]) if found[2] else None)
        .ravel()
    )


def _listed(text: str) -> Groups:
    return tuple(tuple(_numbers(group)) for group in re.findall(r'\{([\d,]+)\}', text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]


def _rows(devices: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in devices.tolist())
