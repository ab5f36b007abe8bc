"""Break down the memory of a device at the peak of a step, by use, site and source line.

The arguments stay in memory for the whole step. `megajax.xla.hlo.buffers` finds the temporaries
that are live at the peak.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from operator import mul

from megajax.analysis.inspect.kernels import kernel_site
from megajax.analysis.inspect.memory_result import HeldArrays, Use
from megajax.analysis.inspect.sites import phase_of
from megajax.core.config import Config
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.core.parallel.layout import Layout
from megajax.core.train.compiled_step import CompiledStep
from megajax.xla.hlo.buffers import Buffer
from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.producers import COPIES, Place, producer
from megajax.xla.hlo.program import Instruction, Program

_Kind = tuple[Use, str, str, str]  # use, part of the step, dtype and shape, source
_ARGUMENTS: dict[str, Use] = {
    'state.params': 'parameters',
    'state.opt_state': 'optimizer state',
}
# The use of an argument's copy in a different dtype or layout.
_COPIED: dict[Use, Use] = {
    'parameters': 'weight copies',
    'optimizer state': 'optimizer',
    'batch and counters': 'forward',
}


def at_peak(config: Config, program: Program, compiled: CompiledStep) -> list[HeldArrays]:
    """Return the uses of the arguments, temporaries and outputs of a step, largest first.

    The bytes add up to everything that XLA reserves.
    """
    groups = defaultdict[_Kind, list[int]](list)
    for argument in program.entry.parameters.values():
        for array in argument.results:
            groups[_use(argument), '-', str(array), _name(argument)].append(array.bytes)
    unnamed = compiled.arguments - sum(map(sum, groups.values()))
    groups['batch and counters', '-', '-', '-'].append(unnamed)
    describe = _Step(config, program).describe
    for buffer in compiled.buffers:
        groups[describe(buffer)].append(buffer.bytes)
    used = sum(buffer.bytes for buffer in compiled.buffers)
    groups['unused', '-', '-', '-'].append(compiled.temporaries - used)
    groups['outputs', '-', '-', '-'].append(compiled.outputs)
    found = [
        HeldArrays(
            use=use, site=site, array=array, count=len(sizes), bytes=sum(sizes), source=source
        )
        for (use, site, array, source), sizes in groups.items()
        if sum(sizes) > 0
    ]
    return sorted(found, key=lambda each: -each.bytes)


class _Step:
    """The program of a step, which shows where each array is made, and all parameter shapes."""

    def __init__(self, config: Config, program: Program):
        self.program = program
        self.places = {
            instruction.name: Place(computation, instruction)
            for computation in program.computations.values()
            for instruction in computation.instructions
        }
        self.shapes = {*_parameter_shapes(config)}

    def describe(self, buffer: Buffer) -> _Kind:
        """Return an array's use, its part of the step, its dtype and shape, and its source line."""
        known = next((name for name in buffer.names if name[0] in self.places), None)
        if known is None and self._is_end(buffer.last):
            # XLA does not print the computation inside an asynchronous operation, which has
            # buffers.
            known = buffer.last, ''
        if known is None:
            raise HloError(f'the program does not have {buffer.names[0][0]}, which has memory')
        name, index = known
        place = self.places[name]._replace(part=tuple(map(int, index.split(',') if index else ())))
        made = producer(self.program, place).instruction
        copied = producer(self.program, place, COPIES).instruction
        site = kernel_site(made.op_name)
        if _is_argument(copied):
            source = self.program.source(made) or _name(copied)
            return _COPIED[_use(copied)], site, buffer.array, source
        return self._use(buffer, made), site, buffer.array, self.program.source(made) or '-'

    def _is_end(self, name: str) -> bool:
        """Return whether the instruction of this name ends an asynchronous operation."""
        return name in self.places and self.places[name].instruction.opcode.endswith('-done')

    def _use(self, buffer: Buffer, made: Instruction) -> Use:
        site, phase = kernel_site(made.op_name), phase_of(made.op_name)
        is_of_model = 'jvp(' in made.op_name  # not a sum of gradients, nor the optimizer
        if (phase == 'backward' or not is_of_model) and self._is_gradient(buffer.array):
            return 'gradients'
        if site in ('head', 'loss'):
            return 'loss and head'
        if site == 'optimizer':
            return 'optimizer'
        if site == 'gradients':
            return 'gradients'
        if site == 'stage':  # inputs of a pipeline's microbatches in flight
            return 'activations'
        if phase == 'forward':
            return 'activations' if self._is_kept(buffer) else 'forward'
        return 'recompute' if phase == 'recompute' else 'backward'

    def _is_kept(self, buffer: Buffer) -> bool:
        """Return whether the last reader of an array from the forward pass is in a later pass."""
        place = self.places.get(buffer.last)
        path = place.instruction.op_name if place else ''
        return not path or phase_of(path) != 'forward'

    def _is_gradient(self, text: str) -> bool:
        """Return whether an array has the shape of a parameter, of all layers or one, in fp32.

        The dims of the array may be merged or reordered. If weights are in 16 bits, the backward
        pass makes no other fp32 arrays of these shapes.
        """
        if not text.startswith('f32'):
            return False
        dims = [int(size) for size in re.findall(r'\d+', text.partition('[')[2]) if size != '1']
        return any(
            {*accumulate(dims, mul)} <= {*accumulate(shape[start:] + shape[:start], mul)}
            for shape in self.shapes
            if prod(shape) == prod(dims)
            for start in range(len(shape))
        )


def _parameter_shapes(config: Config) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all parameters on a device, in a step and as ZeRO shards them.

    A stacked parameter also yields the shape of a single layer.
    """
    sizes, layout = dim_sizes(config.model), Layout.of(config)
    for _, parameter in parameters(config.model):
        dims = parameter.dims
        padding = layout.padding(dims) if parameter.is_matrix else (0,) * len(dims)
        at_rest = layout.shards_at_rest(dims) if parameter.is_matrix else {}
        for shards, more in ((layout.shards, (0,) * len(dims)), (at_rest, padding)):
            whole = map(sum, zip(shape_of(dims, sizes), more, strict=True))
            shape = tuple(n // shards.get(each, 1) for n, each in zip(whole, dims, strict=True))
            yield from (shape, shape[1:]) if parameter.is_stacked else (shape,)


def _is_argument(instruction: Instruction) -> bool:
    return instruction.opcode == 'parameter' and bool(instruction.op_name)


def _use(argument: Instruction) -> Use:
    starts = (use for start, use in _ARGUMENTS.items() if argument.op_name.startswith(start))
    return next(starts, 'batch and counters')


def _name(argument: Instruction) -> str:
    """Return the name of a parameter, or of its moments: `layers.mlp.up.weight`."""
    path = re.sub(r'^state\.(params|opt_state)|\.(mu|nu|value)\b|\[\d+\]', '', argument.op_name)
    return '.'.join(re.findall(r'\w+', path)) or '-'
