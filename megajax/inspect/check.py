"""Collectives of any jitted function, held to what its author expects."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from megajax.hlo.collectives import Collective, collectives
from megajax.hlo.program import Program
from megajax.hlo.transfers import KINDS


def check_collectives(function: Any, args: tuple[Any, ...], expected: Mapping[str, Mapping[str, int]]) -> None:
    """See `megajax.inspect.assert_collectives`."""
    mesh = _mesh(args)
    axes = {_joined(name, mesh): Counter(counts) for name, counts in expected.items()}
    if unknown := {kind for counts in axes.values() for kind in counts} - {*KINDS}:
        raise ValueError(f'no kind of collective {", ".join(sorted(unknown))}: choose among {", ".join(KINDS)}')
    text = function.lower(*args).compile().as_text()
    found = [one for one in collectives(Program(text), mesh) if not one.is_scalar]
    actual: dict[str, Counter[str]] = {axis: Counter() for axis in axes}
    for one in found:
        actual.setdefault(one.axis, Counter())[one.kind] += one.times
    if any(+actual[axis] != +axes.get(axis, Counter()) for axis in actual):
        raise AssertionError(_message(axes, actual, found))


def _joined(name: str, mesh: Mapping[str, int]) -> str:
    """`model_and_data` in the order of the mesh: `data+model`."""
    axes = {name} if name in mesh else {*name.split('_and_')}
    if unknown := axes - {*mesh}:
        raise ValueError(f'no mesh axis {", ".join(sorted(unknown))}: the mesh has {", ".join(mesh)}')
    return '+'.join(axis for axis in mesh if axis in axes)


def _mesh(args: tuple[Any, ...]) -> dict[str, int]:
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, 'sharding', None)
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError('no mesh: place the arguments on one (jax.device_put, or ShapeDtypeStruct with a sharding) or call jax.set_mesh')
    return dict(mesh.shape)


def _message(expected: Mapping[str, Counter[str]], actual: Mapping[str, Counter[str]], found: list[Collective]) -> str:
    lines = ['the compiled function has other collectives than expected']
    for axis in sorted({*expected, *actual}):
        lines.append(f'  over {axis}: expected {dict(expected.get(axis, {})) or "none"}, found {dict(actual.get(axis, {})) or "none"}')
    for one in found:
        times = f'{one.times:4d} x' + (' at most' if one.at_most else '')
        lines.append(f'  {times} {one.kind} over {one.axis} of {one.whole} at {one.op_name} ({one.source})')
    return '\n'.join(lines)
