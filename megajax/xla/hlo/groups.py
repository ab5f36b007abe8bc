"""Parse a collective's groups of devices, in all of XLA's notations, and find their mesh axes."""

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations, pairwise
from math import prod

import numpy as np

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.program import Instruction
from megajax.xla.hlo.transfers import kind_of

Groups = tuple[tuple[int, ...], ...]


def device_groups(instruction: Instruction, num_devices: int) -> Groups:
    """Return a collective's groups of devices, as indices in the flattened mesh.

    For a collective-permute, the groups are its pairs of source and target. Raises HloError for an
    instruction without groups.
    """
    groups = _written(instruction, num_devices)
    return _with_partitions(groups, num_devices) if is_of_replicas(instruction) else groups


def _written(instruction: Instruction, num_devices: int) -> Groups:
    """Return the groups in the text."""
    text = instruction.attributes
    if match := re.search(r'source_target_pairs=\{(.*?)\}(?:,|$)(?! ?\{)', text):
        return _listed(match[1])
    if match := re.search(
        r'replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}', text
    ):
        return _along_axes(match[1], match[2], match[3], instruction.line)
    if match := re.search(r'replica_groups=(\[[\d,]+\])<=(\[[\d,]+\](?:T\([\d,]+\))?)', text):
        return _rows(_iota(match[2]).reshape(_numbers(match[1])))
    if match := re.search(r'replica_groups=\{((?:\{[\d,]*\},?)*)\}', text):
        return _listed(match[1]) or (tuple(range(num_devices)),)
    raise HloError(f'no replica groups: {instruction.line}')


def is_of_replicas(instruction: Instruction) -> bool:
    """Return whether a collective joins all partitions of the replicas in its groups."""
    return (
        kind_of(instruction) in ('all-reduce', 'all-gather', 'reduce-scatter')
        and 'channel_id=' in instruction.attributes
        and 'use_global_device_ids=true' not in instruction.attributes
    )


def _with_partitions(replicas: Groups, num_devices: int) -> Groups:
    """Return groups of devices from groups of replicas, which have equally many partitions each."""
    partitions = num_devices // max(1, sum(map(len, replicas)))
    if partitions <= 1:
        return replicas
    return tuple(
        tuple(replica * partitions + each for replica in group for each in range(partitions))
        for group in replicas
    )


def groups_text(instruction: Instruction) -> str:
    """Return the groups or pairs as they are written in the text."""
    match = re.search(
        r'(?:source_target_pairs|replica_groups)=(.*?)(?:, (?!device_ids)\w+=|$)',
        instruction.attributes,
    )
    return match[1] if match else ''


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the fewest mesh axes that span every group: ('data',), ('data', 'model'), ...

    The result is empty if each group is a single device. Raises HloError for a device that the mesh
    does not have.
    """
    return _axes_of(groups, tuple(mesh.items()))


# The arrays of one instruction have the same groups, and so do many instructions.
@lru_cache(maxsize=256)
def _axes_of(groups: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    names = [name for name, size in mesh if size > 1]
    shape = [size for _, size in mesh if size > 1]
    devices = np.arange(prod(shape)).reshape(shape)
    if not {device for group in groups for device in group} <= {*range(devices.size)}:
        raise HloError(f'groups {groups} name devices that the mesh {dict(mesh)} does not have')
    for count in range(len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            along = np.moveaxis(devices, chosen, range(-count, 0)) if count else devices
            rows = along.reshape(-1, prod(shape[dim] for dim in chosen))
            row_of = np.empty(devices.size, np.int64)
            row_of[rows] = np.arange(len(rows))[:, None]
            if all(len({*row_of[[*group]].tolist()}) <= 1 for group in groups):
                return tuple(names[dim] for dim in chosen)
    raise AssertionError('all axes together span all devices')


def crosses_hosts(groups: Groups, devices_per_host: int) -> bool:
    """Return whether some group has devices on more than one host."""
    return any(len({device // devices_per_host for device in group}) > 1 for group in groups)


def _along_axes(sizes: str, device_ids: str | None, names: str, line: str) -> Groups:
    """Return the groups of a text such as mesh['a'=2,'b'=4] {'b'}.

    {'b':(2)2} is a part of b: a sub-axis of size 2, after a sub-axis of size 2.
    """
    mesh = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    matches = [re.fullmatch(r" ?'([^']+)'(?::\((\d+)\)(\d+))?", name) for name in names.split(',')]
    parts = [
        (match[1], int(match[2] or 1), int(match[3] or mesh[match[1]]))
        for match in matches
        if match and match[1] in mesh
    ]
    if len(parts) < len(matches):
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
    """Return the devices in the order of a text: '[8]', '[2,4]T(1,0)' or a list of devices."""
    match = re.fullmatch(r'(\[[\d,]+\])(?:T(\([\d,]+\)))?', text)
    if not match:
        return np.array(_numbers(text))
    shape = _numbers(match[1])
    return (
        np.arange(prod(shape))
        .reshape(shape)
        .transpose(_numbers(match[2]) if match[2] else None)
        .ravel()
    )


def _listed(text: str) -> Groups:
    return tuple(tuple(_numbers(group)) for group in re.findall(r'\{([\d,]+)\}', text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r'\d+', text)]


def _rows(devices: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in devices.tolist())
