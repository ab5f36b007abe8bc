"""Compiled HLO text as typed records: computations, instructions, shapes and source lines.

A line that the grammar below does not cover raises `HloError` with the line; nothing is skipped.
"""

import dataclasses
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.sources import Sources

if TYPE_CHECKING:
    from megajax.xla.hlo.execution_counts import Runs

DTYPE_BITS = {
    'pred': 8, 's2': 2, 'u2': 2, 's4': 4, 'u4': 4, 's8': 8, 'u8': 8,
    's16': 16, 'u16': 16, 's32': 32, 'u32': 32, 's64': 64, 'u64': 64,
    'f4e2m1fn': 4, 'f8e4m3fn': 8, 'f8e5m2': 8, 'f8e4m3': 8, 'f8e3m4': 8, 'f8e8m0fnu': 8,
    'f8e4m3fnuz': 8, 'f8e5m2fnuz': 8, 'f8e4m3b11fnuz': 8,
    'f16': 16, 'bf16': 16, 'f32': 32, 'f64': 64, 'c64': 64, 'c128': 128, 'token': 0, 'opaque': 0,
}  # fmt: skip

_HEADER = re.compile(r'^(ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$')
_INSTRUCTION = re.compile(r'^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$')
_ARRAY = re.compile(r'(\w+)\[([^\]]*)\](?:\{[^}]*\})?')
_END = re.compile(r'\}(, execution_thread="[^"]*")?')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_MARK = re.compile(r'["\\(){}\[\]]')  # what `_closing` counts
_COMMENT = re.compile(r'/\*.*?\*/')
_CALLED = re.compile(
    r'\b(?:to_apply|calls|body|condition|select|scatter|true_computation|false_computation)'
    r'=%?([\w.\-]+)'
)
_BRANCHES = re.compile(r'\b(?:branch_computations|called_computations)=\{([^}]*)\}')
# The smallest number of computations that an instruction calls, by opcode.
_CALLS = {'fusion': 1, 'fusion-start': 1, 'call': 1, 'conditional': 1, 'while': 2}
_MOST_DIGITS = sys.int_info.default_max_str_digits  # most digits of an integer that Python parses
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Array(NamedTuple):
    """The dtype and the per-device shape of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The array's size on a device, in bytes."""
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape without dims of size 1."""
        return tuple(size for size in self.shape if size != 1)

    def __str__(self) -> str:
        return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Instruction:
    """One line of a computation.

    `results` has one array, or the arrays of a flattened tuple. `type` is the text of the result
    with its layout. `inputs` is the text between the operands' brackets, for example the literal of
    a constant or the number of a parameter.
    """

    name: str
    opcode: str
    type: str
    results: tuple[Array, ...]
    inputs: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    line: str
    is_skipped: bool = False  # is a loop of unknown length that counts as never entered
    steps: int | None = None  # of a loop whose length follows from its condition

    @cached_property
    def op_name(self) -> str:
        """The path of the jax transformations and named scopes that made the instruction.

        Empty if XLA made the instruction.
        """
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ''

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that the instruction calls."""
        attributes = _QUOTED.sub('', self.attributes)
        branches = [
            name.strip(' %') for group in _BRANCHES.findall(attributes) for name in group.split(',')
        ]
        return (*_CALLED.findall(attributes), *branches)

    @property
    def trip_count(self) -> int | None:
        """The number of steps of a while loop; None if the compiler does not know it."""
        if match := _TRIP_COUNT.search(self.attributes):
            return int(match[1])
        return 0 if self.is_skipped else self.steps

    def attribute(self, key: str) -> str | None:
        """Return the number or name after `key=`; None if there is none."""
        match = re.search(rf'\b{key}=%?([\w.\-]+)', self.attributes)
        return match[1] if match else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Computation:
    """A named computation: its instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def place_of(self) -> dict[str, int]:
        """The index of each instruction in the order in which they run, by its name."""
        return {each.name: index for index, each in enumerate(self.instructions)}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction, by its name."""
        users = defaultdict(list)
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(each.inputs): each for each in self.instructions if each.opcode == 'parameter'}

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(instruction for instruction in self.instructions if instruction.is_root)

    def check(self) -> None:
        """Raise HloError if a root, an operand, a parameter number or a called name is missing."""
        if not any(instruction.is_root for instruction in self.instructions):
            raise HloError(f'the computation {self.name} has no ROOT')
        for each in self.instructions:
            if missing := [name for name in each.operands if name not in self.by_name]:
                raise HloError(
                    f'{each.name} reads {missing[0]}, which {self.name} does not have: {each.line}'
                )
            if each.opcode == 'parameter' and not each.inputs.isdecimal():
                raise HloError(f'{each.name} has no number: {each.line}')
            if len(each.called) < _CALLS.get(each.opcode, 0):
                raise HloError(f'{each.name} does not name what it calls: {each.line}')


class Program:
    """A compiled module: its computations by name, their callers, and how often each runs.

    `trip_count` is the number of steps of loops whose length the compiler does not know. Such loops
    in the named scope `skipped` count as never entered.
    """

    def __init__(self, text: str, *, trip_count: int | None = None, skipped: str = ''):
        if too_long := re.search(rf'\d{{{_MOST_DIGITS + 1},}}', text):
            raise HloError(f'a number of {len(too_long[0])} digits: {too_long[0][:20]}...')
        self.computations = {
            computation.name: computation for computation in _computations(text, skipped)
        }
        entries = re.findall(r'^ENTRY %?([\w.\-]+)', text, re.MULTILINE)
        if len(entries) != 1:
            raise HloError(
                f'a compiled module has one ENTRY computation, this text has {len(entries)}'
            )
        self.entry = self.computations[entries[0]]
        for computation in self.computations.values():
            computation.check()
        self.callers = self._callers()
        self.flops: dict[str, int] = {}  # of the computations that were asked for
        self._trip_count = trip_count
        header = text.split('\n', 1)[0]
        counts = re.findall(r'\b(?:num_partitions|replica_count)=(\d+)', header)
        self.num_devices = prod(map(int, counts))
        self.is_for_tpu = ':T(' in header  # only TPUs have tiled layouts
        self._sources = Sources(text)
        if self.is_for_tpu:
            self._count_steps()

    def _count_steps(self) -> None:
        """Count the steps of each loop, which XLA for TPUs leaves to the loop's condition."""
        # Not at the top, because it imports this module.
        from megajax.xla.hlo.evaluate import Run

        counted = {}
        for name, computation in self.computations.items():
            instructions = [
                dataclasses.replace(each, steps=Run(self, computation).loop(each).trip_count)
                if each.opcode == 'while' and each.trip_count is None
                else each
                for each in computation.instructions
            ]
            counted[name] = Computation(name=name, instructions=tuple(instructions))
        self.computations = counted
        self.entry = counted[self.entry.name]
        self.callers = self._callers()

    def _callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        callers = defaultdict(list)
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in instruction.called:
                    if name not in self.computations:
                        raise HloError(
                            f'{instruction.name} calls {name}, which the text does not have: '
                            f'{instruction.line}'
                        )
                    callers[name].append((computation, instruction))
        return callers

    @cached_property
    def runs(self) -> 'Runs':
        """The number of runs of each computation, and the computations that might not run."""
        # Not at the top, because it imports this module.
        from megajax.xla.hlo.execution_counts import Runs

        return Runs(self, self._trip_count)

    def fusion_of(self, computation: Computation) -> tuple[Computation, Instruction] | None:
        """Return the only fusion that calls a computation, and its home; None without one."""
        callers = self.callers.get(computation.name, ())
        return callers[0] if len(callers) == 1 and callers[0][1].opcode == 'fusion' else None

    @property
    def times(self) -> dict[str, int]:
        """The number of runs of each computation in one run of the program, by name.

        See `megajax.xla.hlo.execution_counts`.
        """
        return self.runs.times

    def source(self, instruction: Instruction) -> str:
        """Return the Python frames that made an instruction: `file:line < file:line < ...`.

        The innermost frame comes first. Empty if the text records no frames.
        """
        return self._sources.of(instruction.attributes)


def _computations(text: str, skipped: str) -> Iterator[Computation]:
    name, instructions = None, list[Instruction]()
    for raw in text.splitlines():
        line = _COMMENT.sub('', raw).rstrip()
        if name is None:
            if header := _HEADER.match(line):
                name, instructions = header['name'], []
            elif line.startswith(('%', 'ENTRY ')) or _INSTRUCTION.match(line):
                raise HloError(f'not the header of a computation: {line.strip()}')
        elif _END.fullmatch(line):
            yield Computation(name=name, instructions=tuple(instructions))
            name = None
        elif line:
            instruction = _instruction(line)
            if skipped and instruction.opcode == 'while' and skipped in instruction.op_name:
                instruction = dataclasses.replace(instruction, is_skipped=True)
            instructions.append(instruction)
    if name is not None:
        last = instructions[-1].line if instructions else 'its header'
        raise HloError(f'the text ends inside the computation {name}, after {last}')


def _instruction(line: str) -> Instruction:
    match = _INSTRUCTION.match(line)
    if not match:
        raise HloError(f'not an instruction: {line.strip()}')
    rest = match['rest']
    end = _closing(rest, 0, line) + 1 if rest.startswith('(') else rest.find(' ')
    opcode, bracket, _ = rest[end:].partition('(')
    if end <= 0 or not bracket or not re.fullmatch(r' [a-z][\w\-]*', opcode):
        raise HloError(f'no opcode: {line.strip()}')
    start = end + len(opcode)
    stop = _closing(rest, start, line)
    inputs = rest[start + 1 : stop]
    is_leaf = opcode in (' constant', ' parameter')
    operands = () if is_leaf else tuple(re.findall(r'%([\w.\-]+(?:#\d+)?)', inputs))
    if inputs and not operands and not is_leaf:
        raise HloError(f'operands that are not understood: {line.strip()}')
    return Instruction(
        name=match['name'],
        opcode=opcode.strip(),
        type=rest[:end],
        results=_results(rest[:end], line),
        inputs=inputs,
        operands=operands,
        attributes=rest[stop + 1 :],
        is_root=bool(match['root']),
        line=line.strip(),
    )


def _closing(text: str, start: int, line: str) -> int:
    depth, quoted, place = 0, False, start
    while mark := _MARK.search(text, place):
        char, place = mark[0], mark.end()
        if char == '"':
            quoted = not quoted
        elif char == '\\':
            place += quoted
        elif not quoted:
            depth += 1 if char in '({[' else -1
            if depth == 0:
                return mark.start()
    raise HloError(f'no closing bracket: {line.strip()}')


def _results(text: str, line: str) -> tuple[Array, ...]:
    try:
        return _arrays(text)
    except HloError as error:
        raise HloError(f'{error}: {line.strip()}') from None


# A program has thousands of instructions, and a few hundred types.
@lru_cache(maxsize=1024)
def _arrays(text: str) -> tuple[Array, ...]:
    arrays = []
    for dtype, dims in _ARRAY.findall(text):
        if dtype not in DTYPE_BITS:
            raise HloError(f'unknown dtype {dtype}')
        if not re.fullmatch(r'(<=)?\d+(,(<=)?\d+)*|', dims):
            raise HloError('a shape that is not understood')
        arrays.append(
            Array(dtype, tuple(int(size.removeprefix('<=')) for size in dims.split(',') if size))
        )
    if _ARRAY.sub('', text).strip('(), '):
        raise HloError('a result that is not understood')
    return tuple(arrays)
