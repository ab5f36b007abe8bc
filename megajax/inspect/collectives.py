"""The collectives of a compiled program: each array that crosses the wire, how often, along which axes, and what runs meanwhile."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from math import prod

from megajax.inspect.groups import Groups, axes_of, device_groups
from megajax.inspect.hlo import Array, Computation, HloError, Instruction, Program

KINDS = (
    'all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all', 'collective-permute', 'collective-broadcast'
)  # fmt: skip
_KIND = re.compile(rf'({"|".join(sorted(KINDS, key=len, reverse=True))})(-start)?')
_WRITTEN = re.compile(rf' ({"|".join(KINDS)})(-start)?\(')

# What hands an array on as it is, or in another layout or dtype.
_SAME = {'bitcast', 'copy', 'reshape', 'transpose', 'convert', 'get-tuple-element', 'optimization-barrier', 'copy-start', 'copy-done'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One array that crosses the wire; XLA may have joined several in one instruction (`instruction` is the same then).

    `operand` and `result` are a device's own. `op_name` is that of the array, or of what made it. `overlapped_flops` are of the matrix
    products that run between start and end, on one device; `synchronous` says that nothing can.
    """

    kind: str
    axes: tuple[str, ...]
    groups: Groups
    operand: Array
    result: Array
    times: int
    in_unbounded_loop: bool
    op_name: str
    source: str
    computation: str
    instruction: str
    synchronous: bool
    overlapped_flops: int

    @property
    def axis(self) -> str:
        """`data`, `model`, `data+model`."""
        return '+'.join(self.axes)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends each time, by the ring algorithm."""
        n = max(len(group) for group in self.groups)
        factor = {
            'all-reduce': 2 * (n - 1) / n,
            'all-gather': n - 1,
            'reduce-scatter': (n - 1) / n,
            'all-to-all': (n - 1) / n,
            'ragged-all-to-all': (n - 1) / n,
        }.get(self.kind, 1)
        return factor * self.operand.bytes

    @property
    def whole(self) -> Array:
        """The larger of operand and result: what is gathered, reduced or scattered."""
        return max(self.operand, self.result, key=lambda array: array.bytes)

    @property
    def is_scalar(self) -> bool:
        """Whether it carries one number."""
        return not self.operand.dims


def collectives(program: Program, mesh: Mapping[str, int]) -> list[Collective]:
    """Every collective of a program that runs on a mesh of these axes, in the order of the text.

    What an XLA for CPUs cannot say is read as what it means: an all-reduce of which each device keeps its part is a
    reduce-scatter, and one in fp32 between conversions from and to a smaller dtype is in that dtype.
    """
    return [one for computation in program.computations.values() for one in _of_computation(program, computation, mesh)]


def _of_computation(program: Program, computation: Computation, mesh: Mapping[str, int]) -> Iterator[Collective]:
    for instruction in computation.instructions:
        found = _KIND.fullmatch(instruction.opcode)
        if not found:
            if _WRITTEN.search(instruction.line.split(', metadata=')[0]):
                raise HloError(f'a collective that is not understood: {instruction.line}')
            continue
        if program.times[computation.name]:
            yield from _pieces(program, computation, instruction, found[1], mesh)


def _pieces(
    program: Program, computation: Computation, instruction: Instruction, kind: str, mesh: Mapping[str, int]
) -> Iterator[Collective]:
    groups = device_groups(instruction, prod(mesh.values()))
    axes = axes_of(groups, mesh)
    if not axes:
        return
    synchronous, flops = _overlap(program, computation, instruction)
    for operand, result, name in _operands(program, computation, instruction):
        actual_kind, dtype = _as_meant(program, computation, instruction, kind, operand, groups)
        if actual_kind == 'reduce-scatter' and kind == 'all-reduce':
            result = Array(dtype, (prod(operand.shape) // len(groups[0]),))
        yield Collective(
            kind=actual_kind,
            axes=axes,
            groups=groups,
            operand=operand._replace(dtype=dtype),
            result=result._replace(dtype=dtype),
            times=program.times[computation.name],
            in_unbounded_loop=computation.name in program.unbounded,
            op_name=name or instruction.op_name,
            source=program.source(instruction),
            computation=computation.name,
            instruction=instruction.name,
            synchronous=synchronous,
            overlapped_flops=flops,
        )


def _operands(program: Program, computation: Computation, instruction: Instruction) -> Iterator[tuple[Array, Array, str]]:
    """Operand, result and op_name of each array; of a buffer that joins several, those of its parts."""
    inputs = [computation.by_name[name] for name in instruction.operands]
    results = instruction.results
    if len(results) >= 2 * len(inputs) and instruction.opcode.endswith('-start'):
        results = results[len(inputs) :]  # (operands, results, contexts)
    for made, result in zip(inputs, results, strict=False):
        parts = _joined(program, computation, made)
        if len(parts) > 1:
            yield from ((part.results[0], part.results[0], origin(program, computation, part)) for part in parts)
        else:
            own = instruction.op_name if len(inputs) == 1 else ''
            yield made.results[0], result, own or origin(program, computation, made)


def _joined(program: Program, computation: Computation, made: Instruction) -> list[Instruction]:
    while made.opcode in _SAME and len(made.operands) == 1 and made.opcode != 'get-tuple-element':
        made = computation.by_name[made.operands[0]]
    is_concatenate = made.opcode == 'concatenate'
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        is_concatenate = inside.root.opcode == 'concatenate' and len(inside.instructions) == len(inside.parameters) + 1
    return [_before_reshapes(computation, name) for name in made.operands] if is_concatenate else [made]


def _before_reshapes(computation: Computation, name: str) -> Instruction:
    made = computation.by_name[name]
    while made.opcode in ('bitcast', 'reshape'):
        made = computation.by_name[made.operands[0]]
    return made


def origin(program: Program, computation: Computation, made: Instruction, depth: int = 24) -> str:
    """The op_name of an array, or of the nearest before it that has one; a loop's own name says nothing of what it returns."""
    if depth == 0 or (made.op_name and not made.op_name.endswith('/while')):
        return made.op_name
    if made.opcode == 'get-tuple-element':
        index, owner = int(made.attribute('index') or 0), computation.by_name[made.operands[0]]
        body = owner.attribute('body') if owner.opcode == 'while' else None
        if body is not None:
            inside = program.computations[body]
            if inside.root.opcode == 'tuple':
                return origin(program, inside, inside.by_name[inside.root.operands[index]], depth - 1)
    if made.opcode == 'fusion':
        inside = program.computations[made.called[0]]
        if name := next((one.op_name for one in reversed(inside.instructions) if one.op_name), ''):
            return name
    names = (origin(program, computation, computation.by_name[name], depth - 1) for name in made.operands if name in computation.by_name)
    return next((name for name in names if name), '')


def _as_meant(
    program: Program, computation: Computation, instruction: Instruction, kind: str, operand: Array, groups: Groups
) -> tuple[str, str]:
    if kind != 'all-reduce' or instruction.opcode.endswith('-start'):
        return kind, operand.dtype
    index = next((i for i, name in enumerate(instruction.operands) if computation.by_name[name].results[0] == operand), None)
    readers = list(_readers(program, computation, instruction, index if len(instruction.results) > 1 else None))
    if not readers:
        return kind, operand.dtype
    part = prod(operand.shape) // len(groups[0])
    is_scatter = all(opcode == 'dynamic-slice' and prod(array.shape) == part for opcode, array, _ in readers)
    narrow = {dtype for _, _, dtype in readers}
    dtype = next(iter(narrow)) if len(narrow) == 1 and operand.dtype == 'f32' else operand.dtype
    return 'reduce-scatter' if is_scatter else kind, dtype if dtype in ('bf16', 'f16') else operand.dtype


def _readers(
    program: Program, computation: Computation, made: Instruction, index: int | None = None, dtype: str = '', depth: int = 16
) -> Iterator[tuple[str, Array, str]]:
    """Who reads an array, whatever hands it on between: opcode, result, and the first dtype that it was converted to."""
    for user in computation.users.get(made.name, ()):
        if index is not None and (user.opcode != 'get-tuple-element' or user.attribute('index') != str(index)):
            continue
        if user.opcode == 'fusion':
            inside = program.computations[user.called[0]]
            places = [place for place, name in enumerate(user.operands) if name == made.name]
            for place in places:
                yield from _readers(program, inside, inside.parameters[place], None, dtype, depth - 1)
                if inside.parameters[place] is inside.root:
                    yield 'fusion', user.results[0], dtype
        elif user.opcode in _SAME and depth:
            to = user.results[0].dtype if user.opcode == 'convert' and not dtype else dtype
            handed_on = list(_readers(program, computation, user, None, to, depth - 1))
            yield from handed_on or [(user.opcode, user.results[0], to)]
        else:
            yield user.opcode, user.results[0] if user.results else Array('token', ()), dtype


def _overlap(program: Program, computation: Computation, start: Instruction) -> tuple[bool, int]:
    """Whether it is synchronous, and the FLOPs of the matrix products scheduled between its start and its end."""
    home, first = computation, start
    for caller, one in program.callers.get(computation.name, ()):
        if one.opcode == 'async-start':
            home, first = caller, one
    if not first.opcode.endswith('-start') or '"is_sync":true' in first.attributes:
        return True, 0
    order = home.instructions
    begin = order.index(first)
    end = next((i for i, one in enumerate(order) if first.name in one.operands and one.opcode.endswith('-done')), None)
    if end is None:
        raise HloError(f'no end of {first.name}: {first.line}')
    return False, sum(flops(program, home, one) for one in order[begin + 1 : end])


def flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Of the matrix products in an instruction and in what it calls, on one device."""
    if instruction.opcode in ('dot', 'custom-call'):
        return _product_flops(computation, instruction)
    if instruction.opcode == 'all-reduce':
        return 0
    times = instruction.trip_count or 1
    inside = (program.computations[name] for name in instruction.called)
    return times * sum(flops(program, called, one) for called in inside for one in called.instructions)


def _product_flops(computation: Computation, instruction: Instruction) -> int:
    operands = [computation.by_name[name].results[0] for name in instruction.operands]
    if 'fmha' in instruction.attributes:
        scores = re.search(r'"intermediate_tensor_shape": ?\{"element_type": ?"\w+", ?"dimensions": ?\[([^\]]*)\]', instruction.attributes)
        size = prod(int(number) for number in re.findall(r'\d+', scores[1])) if scores else 0
        return (10 if 'Backward' in instruction.attributes else 4) * size * operands[0].shape[-1]
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:] ?[{\[]([^}\]]*)[}\]]', instruction.attributes)
    if not contracted:
        return 0
    dims = [int(number) for number in re.findall(r'\d+', contracted[1])]
    return 2 * prod(instruction.results[0].shape) * prod(operands[0].shape[dim] for dim in dims)
