"""Collectives of any compiled function, held to what its author expects."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from megajax.hlo.collectives import Collective, collectives
from megajax.hlo.permutes import Pairs, along, fault
from megajax.hlo.program import Program
from megajax.hlo.text import program_text
from megajax.hlo.transfers import KINDS

Declared = str | Pairs | Sequence[str | Pairs]


def check_collectives(
    function: Any,
    args: tuple[Any, ...],
    expected: Mapping[str, Mapping[str, int]],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    trip_count: int | None = None,
    permutes: Mapping[str, Declared] | None = None,
) -> None:
    """See `megajax.inspect.assert_collectives`."""
    if trip_count is not None and (isinstance(trip_count, bool) or not isinstance(trip_count, int) or trip_count < 0):
        raise ValueError(f'trip_count={trip_count!r}: give the number of steps of the loops whose length XLA does not know')
    declared = {name: _declarations(name, value) for name, value in (permutes or {}).items()}
    if unknown := {kind for counts in expected.values() for kind in counts} - {*KINDS}:
        raise ValueError(f'no kind of collective {", ".join(sorted(unknown))}: choose among {", ".join(KINDS)}')
    if isinstance(function, jax.stages.Lowered | jax.stages.Compiled):
        function = _compiled(function, args)
        args = ()
        sizes = _mesh(mesh, function.input_shardings) or _current_mesh()
    else:
        sizes = _mesh(mesh, args) or _current_mesh()
    axes = {'+'.join(_axes(name, sizes)): Counter(counts) for name, counts in expected.items()}
    allowed = {_axes(name, sizes): _allowed(name, pairs, sizes) for name, pairs in declared.items()}
    program = Program(program_text(_compiled(function, args)), trip_count=trip_count)
    found = [one for one in collectives(program, sizes) if one.times]
    if faults := [*_faulty_permutes(found, allowed, prod(sizes.values()))]:
        raise AssertionError('\n'.join(['the compiled function has permutes that lose data', *faults]))
    _check_counts(axes, [one for one in found if one.axes and not one.is_scalar])


def _check_counts(expected: Mapping[str, Counter[str]], found: Sequence[Collective]) -> None:
    actual: dict[str, Counter[str]] = {axis: Counter() for axis in expected}
    for one in found:
        actual.setdefault(one.axis, Counter())[one.kind] += one.times
    if any(+actual[axis] != +expected.get(axis, Counter()) for axis in actual):
        raise AssertionError(_message(expected, actual, found))


def _compiled(function: Any, args: tuple[Any, ...]) -> jax.stages.Compiled:
    """A compiled program from whatever holds one or can be compiled to one."""
    if isinstance(function, jax.stages.Lowered | jax.stages.Compiled):
        if args:
            raise ValueError(f'a {type(function).__name__} program has its arguments already: give none beside it')
        return function.compile() if isinstance(function, jax.stages.Lowered) else function
    if not hasattr(function, 'lower') and callable(function):
        function = jax.jit(function)
    takes = hasattr(function, 'lower') and not isinstance(function, str | bytes)
    compiled = function.lower(*args).compile() if takes else None
    compiled = getattr(compiled, 'compiled', compiled)  # equinox keeps jax's own in a wrapper
    if not isinstance(compiled, jax.stages.Compiled):
        raise ValueError(
            'assert_collectives takes a function, a jitted one (jax.jit, equinox.filter_jit: anything with .lower), a jax.stages.Lowered '
            f'or a jax.stages.Compiled, not {function!r}'
        )
    return compiled


def _axes(name: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """`model_and_data` in the order of the mesh: ('data', 'model')."""
    axes = {name} if name in mesh else {*name.split('_and_')}
    if unknown := axes - {*mesh}:
        raise ValueError(f'no mesh axis {", ".join(sorted(unknown))}: the mesh has {", ".join(mesh)}')
    return tuple(axis for axis in mesh if axis in axes)


def _mesh(mesh: Mesh | AbstractMesh | None, shardings: Any) -> dict[str, int] | None:
    """The sizes of the axes of a mesh, or of that on which shardings or what has one lie."""
    if mesh is not None:
        return dict(mesh.shape)
    for leaf in jax.tree.leaves(shardings):
        sharding = getattr(leaf, 'sharding', leaf)
        if isinstance(sharding, NamedSharding):
            return dict(sharding.mesh.shape)
    return None


def _current_mesh() -> dict[str, int]:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            'no mesh: place the arguments on one (jax.device_put, or ShapeDtypeStruct with a sharding), call jax.set_mesh or give mesh='
        )
    return dict(mesh.shape)


def _declarations(name: str, value: Declared) -> list[str | Pairs]:
    """What an author allows along an axis: one declaration, or several in a list."""
    is_one = isinstance(value, str) or not value or all(_is_pair(one) for one in value)
    declarations: list[Any] = [value] if is_one else [*value]
    for one in declarations:
        if one in ('chain', 'ring') or (not isinstance(one, str) and one and all(_is_pair(pair) for pair in one)):
            continue
        raise ValueError(
            f"permutes: {name}={one!r}: give pairs of positions along the axis such as [(0, 1), (1, 2)], at least one, or 'chain' or 'ring'"
        )
    return declarations


def _is_pair(one: Any) -> bool:
    return isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(place, int) for place in one)


def _allowed(name: str, declarations: Sequence[str | Pairs], mesh: Mapping[str, int]) -> list[frozenset[tuple[int, ...]]]:
    size = prod(mesh[axis] for axis in _axes(name, mesh))
    for pairs in declarations:
        if not isinstance(pairs, str) and (beyond := [place for pair in pairs for place in pair if not 0 <= place < size]):
            raise ValueError(f'permutes: {name} has no position {beyond[0]}: there are {size}')
    return [choice for pairs in declarations for choice in along(pairs, _axes(name, mesh), mesh)]


def _faulty_permutes(
    found: Sequence[Collective], allowed: Mapping[tuple[str, ...], list[frozenset[tuple[int, ...]]]], num_devices: int
) -> Iterator[str]:
    anywhere = [pairs for choices in allowed.values() for pairs in choices]
    for one in found:
        if one.kind != 'collective-permute':
            continue
        reason = fault(one.groups, num_devices)
        is_incomplete = reason is not None and reason[0] == 'permute without a source'
        if frozenset(one.groups) in anywhere and (reason is None or is_incomplete):
            continue
        where = f'{one.times:4d} x of {one.whole} over {one.axis or "no axis"} at {one.op_name} ({one.source})'
        if one.axes in allowed and (reason is None or is_incomplete):
            pairs = ', '.join(map(str, one.groups[:8])) + (', ...' if len(one.groups) > 8 else '')
            yield f'  {where}: its pairs of devices are not the declared ones: {pairs}'
        elif reason:
            fix = (
                f"; if that is meant, declare its pairs: permutes={{'{'_and_'.join(one.axes)}': ...}}" if is_incomplete and one.axes else ''
            )
            yield f'  {where}: {reason[1]}{fix}'


def _message(expected: Mapping[str, Counter[str]], actual: Mapping[str, Counter[str]], found: Sequence[Collective]) -> str:
    lines = ['the compiled function has other collectives than expected']
    for axis in sorted({*expected, *actual}):
        lines.append(f'  over {axis}: expected {dict(expected.get(axis, {})) or "none"}, found {dict(actual.get(axis, {})) or "none"}')
    for one in found:
        times = ('at most ' if one.at_most else '') + f'{one.times} x'
        lines.append(f'  {times:>6} {one.kind} over {one.axis} of {one.whole} at {one.op_name} ({one.source})')
    return '\n'.join(lines)
