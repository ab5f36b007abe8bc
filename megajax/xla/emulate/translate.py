"""Translate the text of a GPU program into an equivalent program for XLA's CPU compiler.

Fusions become calls, an asynchronous pair becomes one instruction in the place of its end, and
layouts are dropped. Devices are partitions in the GPU program and replicas in the translation: as
partitions, the program would go through the partitioner once more. The translation works for the
compiler's last module, and for earlier modules back to the partitioner's.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence

import jax
from jax._src.lib import hlo  # type: ignore[attr-defined]

from megajax.xla.emulate.libraries import meaning
from megajax.xla.emulate.ragged import received
from megajax.xla.emulate.shapes import Shape, joined, shapes, split, without_layouts
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.groups import device_groups
from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.hlo.starts import opcode_of
from megajax.xla.hlo.transfers import KINDS

# Attributes that say how something is computed, not what. A collective without a channel is a
# collective between replicas.
_DROPPED = {
    'kind', 'calls', 'channel_id', 'use_global_device_ids', 'metadata', 'backend_config',
    'frontend_attributes', 'sharding', 'control-predecessors', 'output_to_operand_aliasing',
    'statistics', 'original_value', 'execution_thread', 'async_execution_thread', 'replica_groups',
    'device_ids', 'custom_call_target', 'operand_layout_constraints', 'api_version',
    'custom_call_has_side_effect', 'schedule', 'operand_precision',
}  # fmt: skip
# Instructions whose meaning depends on the backend, or on a host or a peer that is absent.
_UNTRANSLATABLE = {
    'send', 'recv', 'infeed', 'outfeed', 'rng', 'rng-get-and-update-state',
    'collective-broadcast', 'async-update', 'custom-call',
}  # fmt: skip
# Most characters of a line in an error, because a kernel's line contains its bytecode.
LONGEST = 1000
_NARROW_CONSTANT = re.compile(
    r' *(?P<root>ROOT )?%(?P<name>\S+) = (?P<dtype>b?f16|f8\w+)\[(?P<dims>[\d,]*)\]'
    r' constant\((?P<value>.*)\)'
)
_NARROW_FLOAT = re.compile(r'\b(?:b?f16|f8\w+)\[')


def for_cpu(text: str, num_devices: int, *, exact: bool = False) -> str:
    """Return the module for `num_devices` replicas; with `exact`, arrays of 8 and 16 bits are fp32.

    Raises HloError with the line of an instruction that has no translation.
    """
    program = Program(text)
    computations = program.computations.values()
    blocks = [_computation(program, each, num_devices) for each in computations]
    translated = '\n\n'.join(['HloModule emulated', *(text for block in blocks for text in block)])
    return _widened(translated) if exact else translated


def _widened(text: str) -> str:
    text = '\n'.join(_widened_line(line) for line in text.splitlines())
    # Instructions that round without changing the dtype must not round, either. XLA lets the ones
    # for 8- and 16-bit values round fp32 values, so that all of them look alike.
    rounding = re.compile(r' reduce-precision\((.*?)\), exponent_bits=\d+, mantissa_bits=\d+')
    return rounding.sub(r' copy(\1)', text)


def _widened_line(line: str) -> str:
    """Return the line with fp32 instead of 8 and 16 bits; constants are read in the old dtype.

    The text of a constant has only as many digits as its own dtype needs.
    """
    if constant := _NARROW_CONSTANT.fullmatch(line):
        name, dims, root = constant['name'], constant['dims'], constant['root'] or ''
        narrow = f'  %{name}.narrow = {constant["dtype"]}[{dims}] constant({constant["value"]})'
        return f'{narrow}\n  {root}%{name} = f32[{dims}] convert(%{name}.narrow)'
    return _NARROW_FLOAT.sub('f32[', line)


def _computation(program: Program, computation: Computation, num_devices: int) -> Iterator[str]:
    """Yield the computation, preceded by the computations that replace its library calls."""
    head = 'ENTRY ' if computation is program.entry else ''
    lines = [f'{head}%{computation.name} {{']
    for instruction in computation.instructions:
        if instruction.opcode.endswith('-start'):
            continue
        translation = _Translation(computation, instruction, num_devices)
        lines += translation.lines()
        yield from translation.computations
    yield '\n'.join([*lines, '}'])


class _Translation:
    """The lines that replace one instruction, and the computations that they call.

    The last line has the name of the instruction.
    """

    def __init__(self, computation: Computation, instruction: Instruction, num_devices: int):
        self.computation, self.instruction, self.num_devices = computation, instruction, num_devices
        self.source = instruction
        if instruction.opcode.endswith('-done'):
            self.source = computation.by_name[instruction.operands[0]]
        self.opcode = opcode_of(self.source)
        self.operands = [computation.by_name[name] for name in self.source.operands]
        self.type = without_layouts(instruction.type)
        self.computations: list[str] = []
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """Return the lines of the translation. Raises HloError if there is none."""
        self._translators().get(self.opcode, self._as_it_is)()
        root = 'ROOT ' if self.instruction.is_root else ''
        return [*self._lines[:-1], f'  {root}{self._lines[-1].strip()}']

    def _translators(self) -> dict[str, Callable[[], None]]:
        refused = dict.fromkeys(_UNTRANSLATABLE, self._refuse)
        collectives = dict.fromkeys(KINDS, self._collective)
        return collectives | refused | {
            'async': self._call, 'fusion': self._call, 'bitcast': self._bitcast,
            'custom-call': self._library_call, 'dot': self._dot, 'partition-id': self._device,
            'replica-id': self._first_replica, 'all-to-all': self._all_to_all,
            'ragged-all-to-all': self._ragged_all_to_all,
        }  # fmt: skip

    def _add(self, type_: str, opcode: str, inputs: str, attributes: str = '') -> str:
        """Append an instruction under a new name, and return that name."""
        name = f'%{self.instruction.name}.emulated.{len(self._lines)}'
        self._lines.append(f'  {name} = {type_} {opcode}({inputs}){attributes}')
        return name

    def _finish(self, opcode: str, inputs: str, attributes: str = '') -> None:
        """Append the last instruction, which gets the name of the translated one."""
        line = f'%{self.instruction.name} = {self.type} {opcode}({inputs}){attributes}'
        self._lines.append(f'  {line}')

    @property
    def _inputs(self) -> str:
        names = [f'%{operand.name}' for operand in self.operands]
        return ', '.join(names) if names else self.source.inputs

    def _attributes(self) -> str:
        pieces = split(self.source.attributes)
        kept = [piece for piece in pieces if piece.split('=')[0] not in _DROPPED]
        return ''.join(f', {piece}' for piece in kept if '=' in piece)

    def _refuse(self) -> None:
        raise HloError(f'no translation for {self.source.line}')

    def _as_it_is(self) -> None:
        algorithm = self.source.attribute('algorithm') or ''
        if self.opcode == 'rng-bit-generator' and algorithm == 'rng_default':
            self._refuse()  # each backend has a different algorithm
        self._finish(self.opcode, self._inputs, self._attributes())

    def _call(self) -> None:
        self._finish('call', self._inputs, f', to_apply=%{self.source.attribute("calls")}')

    def _device(self) -> None:
        self._finish('replica-id', '')

    def _first_replica(self) -> None:
        self._finish('constant', '0')

    def _dot(self) -> None:
        """Widen narrow operands: CPUs have no fp32 matmul of 16-bit types, and no FP8 matmul."""
        operands = [shapes(operand.type)[0] for operand in self.operands]
        [result] = shapes(self.type)
        if not any(_NARROW_FLOAT.match(str(shape)) for shape in operands):
            return self._as_it_is()
        wide = [
            self._add(f'f32[{joined(shape.dims)}]', 'convert', f'%{operand.name}')
            for shape, operand in zip(operands, self.operands, strict=True)
        ]
        type_ = f'f32[{joined(result.dims)}]'
        product = self._add(type_, 'dot', ', '.join(wide), self._attributes())
        return self._finish('convert', product)

    def _bitcast(self) -> None:
        """Give the bytes a different shape: transpose to memory order, reshape, transpose back."""
        [before], [after] = shapes(self.operands[0].type), shapes(self.instruction.type)
        value = self._inputs
        if before.dtype != after.dtype:
            before = before._replace(dtype=after.dtype)
            value = self._add(str(before), 'bitcast-convert', value)
        physical = f'{after.dtype}[{joined(before.physical)}]'
        dims = f', dimensions={{{joined(before.order)}}}'
        value = self._add(physical, 'transpose', value, dims)
        value = self._add(f'{after.dtype}[{joined(after.physical)}]', 'reshape', value)
        places = [after.order.index(dim) for dim in range(len(after.order))]
        self._finish('transpose', value, f', dimensions={{{joined(places)}}}')

    def _collective(self) -> None:
        """Split a collective of several arrays: StableHLO supports these only in all-reduces."""
        attributes = self._attributes() + self._groups()
        results = shapes(self.type)
        if not self.type.startswith('('):
            return self._finish(self.opcode, self._inputs, attributes)
        parts = [
            self._add(str(shape), self.opcode, f'%{operand.name}', attributes)
            for shape, operand in zip(results, self.operands, strict=True)
        ]
        return self._finish('tuple', ', '.join(parts))

    def _all_to_all(self) -> None:
        """Join several operands, the parts for each device of the group, into a single exchange."""
        if not self.type.startswith('('):
            return self._collective()
        parts, count = shapes(self.type), len(self.operands)
        row = Shape(parts[0].dtype, (1, *parts[0].dims), ())
        all_rows = str(row._replace(dims=(count, *row.dims[1:])))
        rows = [self._add(str(row), 'reshape', f'%{part.name}') for part in self.operands]
        joined_rows = self._add(all_rows, 'concatenate', ', '.join(rows), ', dimensions={0}')
        attributes = f'{self._groups()}, dimensions={{0}}'
        exchanged = self._add(all_rows, 'all-to-all', joined_rows, attributes)
        received = [
            self._add(str(part), 'reshape', self._row(exchanged, row, index))
            for index, part in enumerate(parts)
        ]
        return self._finish('tuple', ', '.join(received))

    def _ragged_all_to_all(self) -> None:
        """Gather all rows and offsets, and let each device take the rows that are sent to it."""
        groups = self._listed_groups()
        sent, output, *numbers = (
            (shapes(each.type)[0], f'%{each.name}') for each in self.operands[:5]
        )
        gathered = [
            self._gathered(*each, len(groups[0])) for each in [sent, *map(self._s32, numbers)]
        ]
        ranks = {device: rank for group in groups for rank, device in enumerate(group)}
        every = joined(ranks[device] for device in range(self.num_devices))
        table = self._add(f's32[{self.num_devices}]', 'constant', f'{{{every}}}')
        device = self._add('u32[]', 'replica-id', '')
        rank = Shape('s32', (1,), ())
        own = self._add(
            str(rank), 'dynamic-slice', f'{table}, {device}', ', dynamic_slice_sizes={1}'
        )
        given, inputs = zip(output, *gathered, (rank, own), strict=True)
        name = f'{self.instruction.name}.rows'
        self.computations.append(_renamed(_hlo(received, given), name))
        value = self._add(f'({self.type})', 'call', ', '.join(inputs), f', to_apply=%{name}')
        self._finish('get-tuple-element', value, ', index=0')

    def _s32(self, number: tuple[Shape, str]) -> tuple[Shape, str]:
        shape, name = number
        narrow = shape._replace(dtype='s32')
        return narrow, self._add(str(narrow), 'convert', name)

    def _gathered(self, shape: Shape, name: str, count: int) -> tuple[Shape, str]:
        """Gather the arrays of a group's devices in one, with a first dim of devices."""
        one, every = (Shape(shape.dtype, (size, *shape.dims), ()) for size in (1, count))
        row = self._add(str(one), 'reshape', name)
        attributes = f'{self._groups()}, dimensions={{0}}'
        return every, self._add(str(every), 'all-gather', row, attributes)

    def _row(self, array: str, row: Shape, index: int) -> str:
        full_dims = ', '.join(f'[0:{size}]' for size in row.dims[1:])
        bounds = ', '.join(filter(None, [f'[{index}:{index + 1}]', full_dims]))
        return self._add(str(row), 'slice', array, f', slice={{{bounds}}}')

    def _groups(self) -> str:
        """Return the groups as lists of devices: mesh axes would not preserve their order."""
        if 'channel_id=' not in self.source.attributes:
            raise HloError(f'a collective that is not between partitions: {self.source.line}')
        if self.opcode == 'collective-permute':
            return ''
        listed = ','.join(f'{{{joined(group)}}}' for group in self._listed_groups())
        return f', replica_groups={{{listed}}}'

    def _listed_groups(self) -> Sequence[Sequence[int]]:
        return device_groups(self.source, self.num_devices)

    def _library_call(self) -> None:
        operands = tuple(shapes(operand.type)[0] for operand in self.operands)
        results = tuple(shapes(self.instruction.type))
        name = f'{self.instruction.name}.library'
        try:
            text = _lowered(self.source.attributes, operands, results)
        except HloError as error:
            raise HloError(f'{error}, in {self.source.line[:LONGEST]}') from error
        self.computations.append(_renamed(text, name))
        if self.type.startswith('('):
            self._finish('call', self._inputs, f', to_apply=%{name}')
        else:
            value = self._add(f'({self.type})', 'call', self._inputs, f', to_apply=%{name}')
            self._finish('get-tuple-element', value, ', index=0')


@functools.lru_cache(maxsize=256)
def _lowered(attributes: str, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> str:
    """Return HLO that computes the same results as a library call."""
    function = meaning(attributes, results)

    def named(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        outputs = function(*arrays)
        if len(outputs) != len(results):  # XLA's converter would crash
            counts = f'{len(results)} results, but its translation has {len(outputs)}'
            raise HloError(f'a library call has {counts}')
        return outputs

    return _hlo(named, operands)


def _hlo(function: Callable[..., tuple[jax.Array, ...]], operands: Sequence[Shape]) -> str:
    """Return the computations of a jax function."""
    abstract = [shape.abstract() for shape in operands]
    lowered = jax.jit(function, keep_unused=True).lower(*abstract).compiler_ir('hlo')
    assert lowered is not None
    printed = hlo.HloPrintOptions()
    printed.print_large_constants, printed.print_percent = True, True
    printed.include_layout_in_shapes, printed.print_metadata = False, False
    return lowered.as_hlo_module().to_string(printed).split('\n', 1)[1]


def _renamed(text: str, name: str) -> str:
    """Return the computations of a module, renamed to start with `name`; the entry is `name`."""
    text = re.sub(r'%([\w.-]+)', rf'%{name}.\1', text)
    return re.sub(r'ENTRY %\S+', f'%{name}', text).strip()
