"""A part of a module as a module of its own, with parameters for the values that it reads."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax._src.lib import hlo  # type: ignore[attr-defined]

from megajax.xla.emulate.last_module import full_text
from megajax.xla.emulate.shapes import joined, split
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.groups import device_groups, is_of_replicas
from megajax.xla.hlo.program import Computation, Instruction, Program

# Instructions without operands: they cost as much as the parameter that would replace them.
LEAVES = {'constant', 'iota', 'partition-id', 'replica-id', 'after-all'}
REPLICATED = '{replicated}'
_DROPPED = 'origin=', 'original_value=', 'statistics=', 'device_ids='

_OF_SHARDY = 'frontend_attributes={xla.sdy'
_OF_TUPLES = (*_DROPPED, 'sharding=')


class Cut(NamedTuple):
    """Some instructions of a computation, as the entry of a module of their own.

    The module returns `results`. Values that it reads and does not compute are its parameters.
    """

    program: Program
    home: Computation
    kept: frozenset[str]
    results: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, home: Computation, names: Iterable[str]) -> 'Cut':
        """Return the part that returns each value that the rest of the computation reads."""
        kept = _closed(home, names)
        results = [
            each.name
            for each in home.instructions
            if each.name in kept and each.opcode not in LEAVES and (_is_array(each) or each.is_root)
            if each.is_root or any(user.name not in kept for user in home.users[each.name])
        ]
        return cls(program, home, kept, tuple(results)).live()

    def without(self, names: Iterable[str], *, returning: bool = False) -> 'Cut':
        """Return the part without these instructions, whose values become parameters.

        Operands of a removed result are results instead. With `returning`, so are the operands of
        every other removed instruction.
        """
        kept = _closed(self.home, self.kept - {*names})
        gone = self.kept - kept
        sources = gone if returning else gone & {*self.results}
        read = {name for each in sources for name in self.home.by_name[each].operands}
        results = [
            each.name
            for each in self.home.instructions
            if each.name in kept and each.opcode not in LEAVES and _is_array(each)
            if each.name in self.results or each.name in read
        ]
        return Cut(self.program, self.home, kept, tuple(results)).live()

    def live(self) -> 'Cut':
        """Return the part without instructions that no result depends on."""
        needed = {*self.results}
        for each in reversed(self.home.instructions):
            if each.name in needed and each.name in self.kept:
                needed.update(each.operands)
        return self._replace(kept=self.kept & needed)

    @property
    def removable(self) -> list[str]:
        """The instructions that can be removed, in the order of the module."""
        return [
            each.name
            for each in self.home.instructions
            if each.name in self.kept and each.opcode not in LEAVES
        ]

    @property
    def size(self) -> tuple[int, int]:
        """The numbers of instructions and of results."""
        return len(self.kept), len(self.results)

    def text(self) -> str:
        """Return the module. Raises HloError if it would read a tuple that it does not compute."""
        if not self.results:
            raise HloError('no results')
        header = f'HloModule reduced, num_partitions={self.program.num_devices}'
        called = [_computation(self.program, name) for name in self._called()]
        written = '\n\n'.join([header, *called, self._entry()])
        try:
            return full_text(hlo.hlo_module_from_text(written))
        except jax.errors.JaxRuntimeError as error:
            raise HloError(str(error).splitlines()[0]) from error

    def _entry(self) -> str:
        kept = [each for each in self.home.instructions if each.name in self.kept]
        read = [name for each in kept for name in each.operands if name not in self.kept]
        parameters = [self.home.by_name[name] for name in dict.fromkeys(read)]
        if missing := [each for each in parameters if not _is_array(each)]:
            raise HloError(f'a part reads a tuple: {missing[0].line}')
        is_sharded = any(map(sharding, self.home.instructions))
        lines = [
            f'  %{each.name} = {each.type} parameter({number}){_sharded([each], is_sharded)}'
            for number, each in enumerate(parameters)
        ]
        results = [self.home.by_name[name] for name in self.results]
        only = results[0].name if len(results) == 1 else ''
        lines += [_line(self.program, each, is_root=each.name == only) for each in kept]
        if not only:
            types = ', '.join(each.type for each in results)
            names = ', '.join(f'%{each.name}' for each in results)
            root = f'  ROOT %results = ({types}) tuple({names})'
            lines.append(root + _sharded(results, is_sharded))
        return '\n'.join(['ENTRY %main {', *lines, '}'])

    def _called(self) -> list[str]:
        """Return the names of the called computations, callees first."""
        found: dict[str, None] = {}

        def visit(instructions: Iterable[Instruction]) -> None:
            for each in instructions:
                for name in each.called:
                    if name not in found:
                        visit(self.program.computations[name].instructions)
                        found[name] = None

        visit(self.home.by_name[name] for name in self.removable)
        return [*found]


def sharding(instruction: Instruction) -> str:
    """Return the sharding of an instruction; empty if it has none."""
    for piece in split(instruction.attributes):
        if piece.startswith('sharding='):
            return piece.removeprefix('sharding=')
    return ''


def without_shardings(text: str) -> str:
    """Return a module of the partitioner without the shardings that it has used."""
    return re.sub(r', sharding=\{(?:[^{}]|\{[^{}]*\})*\}', '', text)


def _sharded(instructions: Sequence[Instruction], is_sharded: bool) -> str:
    if not is_sharded:
        return ''
    parts = [sharding(each) or REPLICATED for each in instructions]
    return f', sharding={parts[0] if len(parts) == 1 else "{" + ", ".join(parts) + "}"}'


def whole(program: Program, home: Computation) -> Cut:
    """Return a computation as a module that takes and returns arrays instead of tuples."""
    return Cut.of(program, home, [each.name for each in home.instructions])


def homes(program: Program) -> Iterator[Computation]:
    """Yield the computations that can be a module: smaller ones first, and the entry last."""
    bodies = {
        name
        for computation in program.computations.values()
        for each in computation.instructions
        if each.opcode in ('while', 'call', 'conditional')
        for name in each.called
    }
    found = [program.computations[name] for name in bodies]
    yield from sorted(found, key=lambda each: (len(each.instructions), each.name))
    yield program.entry


def count(text: str) -> int:
    """Return the number of instructions of a module, in all of its computations."""
    computations = Program(text).computations.values()
    return sum(len(each.instructions) for each in computations)


def _closed(home: Computation, names: Iterable[str]) -> frozenset[str]:
    """Return the names without those that must become parameters, and with the leaves they read.

    An element is part of the module exactly if its tuple is, and so is the tuple that a kept
    instruction reads.
    """
    kept = {*names}
    for each in reversed(home.instructions):
        if each.name in kept:
            read = [home.by_name[name] for name in each.operands]
            kept |= {one.name for one in read if one.opcode in (*LEAVES, 'tuple')}
    for each in home.instructions:
        if each.opcode == 'parameter' or (each.opcode == 'tuple' and each.is_root):
            kept.discard(each.name)
        elif each.opcode == 'get-tuple-element':
            (kept.add if each.operands[0] in kept else kept.discard)(each.name)
    return frozenset(kept)


def _is_array(instruction: Instruction) -> bool:
    return not instruction.type.startswith('(') and instruction.type[:6] != 'token['


def _computation(program: Program, name: str) -> str:
    instructions = program.computations[name].instructions
    lines = [_line(program, each, is_root=each.is_root) for each in instructions]
    return '\n'.join([f'%{name} {{', *lines, '}'])


def _line(program: Program, instruction: Instruction, *, is_root: bool) -> str:
    """Return the line of an instruction, with only those attributes that change its meaning."""
    each = instruction
    # XLA's converter to StableHLO gives loops more values, so that shardings of tuples do not fit.
    dropped = _DROPPED if _is_array(each) or each.opcode == 'custom-call' else _OF_TUPLES
    pieces = [piece for piece in split(each.attributes) if not piece.startswith(dropped)]
    pieces = [
        _groups(each, program.num_devices) if piece.startswith('replica_groups=') else piece
        for piece in pieces
        if '=' in piece and not piece.startswith('metadata=')
    ]
    # Shardy's attributes name a mesh, which a part does not have.
    pieces = [piece for piece in pieces if not piece.startswith(_OF_SHARDY)]
    if each.op_name:
        pieces.append(f'metadata={{op_name="{each.op_name}"}}')
    inputs = ', '.join(f'%{name}' for name in each.operands) or each.inputs
    attributes = ''.join(f', {piece}' for piece in pieces)
    root = 'ROOT ' if is_root else ''
    opcode = each.opcode
    if opcode == 'copy':  # StableHLO has no copies
        opcode = 'custom-call' if sharding(each) else 'reshape'
        attributes += ', custom_call_target="Sharding"' if sharding(each) else ''
    return f'  {root}%{each.name} = {each.type} {opcode}({inputs}){attributes}'


def _groups(collective: Instruction, num_devices: int) -> str:
    """Return the groups as lists of devices: XLA's converter to StableHLO loses the order of mesh
    axes.
    """
    groups = ','.join(f'{{{joined(group)}}}' for group in device_groups(collective, num_devices))
    of_devices = ', use_global_device_ids=true' if is_of_replicas(collective) else ''
    return f'replica_groups={{{groups}}}{of_devices}'
