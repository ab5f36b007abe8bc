"""Compare the collectives of any compiled function with those that its author expects."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import NamedSharding

from megajax.xla.emulate.arguments import (
    AnyMesh,
    context,
    is_of_equinox,
    of_arrays,
    of_jax,
    on_devices,
    one_shape,
    simulated_mesh,
)
from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.permutes import SHOWN, DevicePairs, Pairs, along, fault
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.text import program_text
from megajax.xla.hlo.transfers import KINDS

Declared = str | Pairs | Sequence[str | Pairs]


def check_collectives(
    function: Any,
    args: tuple[Any, ...],
    expected: Mapping[str, Mapping[str, int]],
    *,
    mesh: AnyMesh | None = None,
    trip_count: int | None = None,
    permutes: Mapping[str, Declared] | None = None,
) -> None:
    """Raise AssertionError as `megajax.inspect.assert_collectives` describes."""
    check_trip_count(trip_count)
    declared = {name: _declarations(name, value) for name, value in (permutes or {}).items()}
    if unknown := {kind for counts in expected.values() for kind in counts} - {*KINDS}:
        names = ', '.join(sorted(unknown))
        raise ValueError(f'no kind of collective {names}: choose among {", ".join(KINDS)}')
    function, args, sizes = prepared(function, args, mesh)
    axes = {'+'.join(_axes(name, sizes)): Counter(counts) for name, counts in expected.items()}
    allowed = {_axes(name, sizes): _allowed(name, pairs, sizes) for name, pairs in declared.items()}
    program = Program(program_text(compiled_program(function, args, mesh)), trip_count=trip_count)
    check_mesh(program, sizes)
    executed = [collective for collective in collectives(program, sizes) if collective.times]
    if faults := [*_faulty_permutes(executed, allowed, prod(sizes.values()))]:
        head = 'the compiled function has permutes that lose data or differ from their declaration'
        raise AssertionError('\n'.join([head, *faults]))
    arrays = [collective for collective in executed if not collective.is_scalar_in_whole]
    _check_counts(axes, [collective for collective in arrays if collective.axes])


def prepared(
    function: Any, args: tuple[Any, ...], mesh: AnyMesh | None
) -> tuple[Any, tuple[Any, ...], dict[str, int]]:
    """Return what to compile, its arguments, and the axis sizes of its mesh.

    A Lowered is compiled here, because only the compiled program has its shardings. Raises
    ValueError if there is no mesh.
    """
    function = of_jax(function)
    if isinstance(function, jax.stages.Lowered | jax.stages.Compiled):
        function = compiled_program(function, args, mesh)
        shardings = function.input_shardings, function.output_shardings
        return function, (), _mesh(mesh, shardings) or _current_mesh()
    if is_of_equinox(function):
        function, args = of_arrays(function, args)
    return function, args, _mesh(mesh, args) or _current_mesh()


def check_mesh(program: Program, mesh: Mapping[str, int]) -> None:
    """Raise ValueError unless a program of several devices has as many as its mesh."""
    size = prod(mesh.values())
    if program.num_devices not in (1, size):
        raise ValueError(
            f'the mesh {dict(mesh)} has {size} devices, but the program is compiled for '
            f'{program.num_devices}: give the mesh that it was compiled for'
        )


def check_trip_count(count: Any) -> None:
    """Raise ValueError unless a trip count is None or a number of steps."""
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 0):
        return
    reason = 'give the number of steps of the loops whose length XLA does not know'
    raise ValueError(f'trip_count={count!r}: {reason}')


def _check_counts(expected: Mapping[str, Counter[str]], placed: Sequence[Collective]) -> None:
    actual: dict[str, Counter[str]] = {axis: Counter() for axis in expected}
    for collective in placed:
        actual.setdefault(collective.axis, Counter())[collective.kind] += collective.times
    if any(+actual[axis] != +expected.get(axis, Counter()) for axis in actual):
        raise AssertionError(_message(expected, actual, placed))


def compiled_program(
    function: Any, args: tuple[Any, ...], mesh: AnyMesh | None
) -> jax.stages.Compiled:
    """Return the compiled program of anything that contains one or can be compiled to one.

    A function is compiled for `mesh`, or else for the mesh of the arguments or the current mesh.
    """
    if isinstance(function, jax.stages.Lowered | jax.stages.Compiled):
        if args:
            name = type(function).__name__
            raise ValueError(f'a {name} program already has its arguments: do not pass any')
        return function.compile() if isinstance(function, jax.stages.Lowered) else function
    if not hasattr(function, 'lower') and callable(function):
        function = jax.jit(function)
    can_lower = hasattr(function, 'lower') and not isinstance(function, str | bytes)
    compiled = None
    if can_lower:
        with context(args, mesh):
            placed = on_devices(args, simulated_mesh(args, mesh))
            compiled = function.lower(*placed).compile()
    compiled = of_jax(compiled)
    if not isinstance(compiled, jax.stages.Compiled):
        raise ValueError(
            'assert_collectives takes a function, a jitted one (jax.jit, equinox.filter_jit: '
            'anything with .lower), a jax.stages.Lowered or a jax.stages.Compiled, '
            f'not {function!r}'
        )
    return compiled


def _axes(name: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a name in the mesh's order: `model_and_data` is ('data', 'model')."""
    axes = {name} if name in mesh else {*name.split('_and_')}
    if unknown := axes - {*mesh}:
        names = ', '.join(sorted(unknown))
        raise ValueError(f'no mesh axis {names}: the mesh has {", ".join(mesh)}')
    return tuple(axis for axis in mesh if axis in axes)


def _mesh(mesh: AnyMesh | None, shardings: Any) -> dict[str, int] | None:
    """Return the axis sizes of `mesh`, or else of the meshes in a tree of shardings or arrays.

    Raises ValueError if two meshes of the tree differ.
    """
    if mesh is not None:
        return dict(mesh.shape)
    leaves = [getattr(leaf, 'sharding', leaf) for leaf in jax.tree.leaves(shardings)]
    meshes = [leaf.mesh for leaf in leaves if isinstance(leaf, NamedSharding)]
    return one_shape(meshes)


def _current_mesh() -> dict[str, int]:
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        forms = '(jax.device_put, or ShapeDtypeStruct with a sharding)'
        ways = f'place the arguments on one {forms}, call jax.set_mesh or give mesh='
        raise ValueError(f'no mesh: {ways}')
    return dict(mesh.shape)


def _declarations(name: str, value: Declared) -> list[str | Pairs]:
    """Return the declarations along an axis as a list; the author may give a single one."""
    is_single = isinstance(value, str) or not value or all(_is_pair(pair) for pair in value)
    declarations: list[Any] = [value] if is_single else [*value]
    for pairs in declarations:
        if pairs in ('chain', 'ring'):
            continue
        is_sequence = isinstance(pairs, tuple | list)
        if not is_sequence or not pairs or not all(_is_pair(pair) for pair in pairs):
            forms = "pairs of positions along the axis such as [(0, 1), (1, 2)], 'chain' or 'ring'"
            problem = f'permutes: {name}={pairs!r}: give {forms}'
            raise ValueError(f'{problem}; a permute without pairs loses all data')
        if any(len({*places}) < len(places) for places in zip(*pairs, strict=True)):
            reason = 'a position is the source of at most one pair, and the target of at most one'
            raise ValueError(f'permutes: {name}={pairs!r}: {reason}')
    return declarations


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(isinstance(place, int) for place in pair)


def _allowed(
    name: str,
    declarations: Sequence[str | Pairs],
    mesh: Mapping[str, int],
) -> list[DevicePairs]:
    """Return the pairs of devices that the author's declarations for an axis allow."""
    size = prod(mesh[axis] for axis in _axes(name, mesh))
    for pairs in declarations:
        places = [] if isinstance(pairs, str) else [place for pair in pairs for place in pair]
        if beyond := [place for place in places if not 0 <= place < size]:
            raise ValueError(f'permutes: {name} has no position {beyond[0]}: its size is {size}')
    axes = _axes(name, mesh)
    return [choice for pairs in declarations for choice in along(pairs, axes, mesh)]


def _faulty_permutes(
    executed: Sequence[Collective],
    allowed: Mapping[tuple[str, ...], list[DevicePairs]],
    num_devices: int,
) -> Iterator[str]:
    anywhere = [pairs for choices in allowed.values() for pairs in choices]
    for permute in (each for each in executed if each.kind == 'collective-permute'):
        pairs = permute.groups
        if frozenset(pairs) in anywhere:
            continue
        rule, sentence = fault(pairs, num_devices) or ('', '')
        if permute.axes in allowed:
            shown = ', '.join(map(str, pairs[:SHOWN])) + ', ...' * (len(pairs) > SHOWN)
            sentence = f'its pairs of devices are not the declared ones: {shown}'
        elif rule == 'permute without a source' and permute.axes:
            name = '_and_'.join(permute.axes)
            sentence += f"; if this is intended, declare its pairs: permutes={{'{name}': ...}}"
        if sentence:
            array = f'{permute.whole} over {permute.axis or "no axis"}'
            yield f'  {permute.times:4d} x of {array} at {permute.place}: {sentence}'


def _message(
    expected: Mapping[str, Counter[str]],
    actual: Mapping[str, Counter[str]],
    placed: Sequence[Collective],
) -> str:
    lines = ['the compiled function does not have the expected collectives']
    for axis in sorted({*expected, *actual}):
        wanted, counted = (dict(counts.get(axis, {})) or 'none' for counts in (expected, actual))
        lines.append(f'  over {axis}: expected {wanted}, found {counted}')
    for collective in placed:
        times = ('at most ' if collective.at_most else '') + f'{collective.times} x'
        array = f'{collective.kind} over {collective.axis} of {collective.whole}'
        lines.append(f'  {times:>6} {array} at {collective.place}')
    return '\n'.join(lines)
