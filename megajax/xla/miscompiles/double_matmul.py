"""A matmul that runs twice: XLA clones a cuBLAS call whose result is both read and stacked."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Lowered

from megajax.xla.hlo.products import is_rematerialized
from megajax.xla.hlo.program import Computation, Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro, replicated
from megajax.xla.miscompiles.trace import Place, places, trace

Key = tuple[object, ...]


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every matmul that has the same operands and path as an earlier one, even in fusions."""
    first: dict[str, set[Key]] = defaultdict(set)
    for place in places(program):
        is_cublas = '"__cublas$' in place.instruction.attributes
        if is_cublas and not is_rematerialized(program, *place):
            home = _home(program, place.home)
            key = _product(program, place)
            if key in first[home]:
                yield place.instruction
            first[home].add(key)


def _home(program: Program, computation: Computation) -> str:
    """Return the computation that runs this one as a fusion, or this computation itself."""
    callers = program.callers.get(computation.name, [])
    if len(callers) == 1 and callers[0][1].opcode in ('fusion', 'fusion-start'):
        return _home(program, callers[0][0])
    return computation.name


def _product(program: Program, place: Place) -> Key:
    instruction = place.instruction
    dims = re.search(r'"dot_dimension_numbers":\{.*?\}', instruction.attributes)
    operands = [_value(program, place.operand(index)) for index in range(len(instruction.operands))]
    # A matmul that the author recomputes has a different path.
    return (instruction.op_name, instruction.results[0], dims[0] if dims else '', *operands)


def _value(program: Program, place: Place) -> Key:
    """Return a key that identifies a value; equal slices of the same array have equal keys."""
    # A carried value is not what the iteration returns for it.
    home, instruction = place = trace(program, place, around=False)
    if instruction.opcode == 'dynamic-slice':
        operands = (place.operand(index) for index in range(len(instruction.operands)))
        return (
            'slice',
            instruction.results[0].dims,
            *(_value(program, operand) for operand in operands),
        )
    if instruction.opcode == 'constant':
        return ('constant', instruction.results, instruction.line.partition('constant(')[2])
    if instruction.opcode == 'get-tuple-element':
        return (*_value(program, place.operand(0)), instruction.attribute('index'))
    return (home.name, instruction.name)


def _lower(devices: Sequence[Any]) -> Lowered:
    def stacked(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = x @ w
            return jnp.tanh(h), h

        return lax.scan(layer, x, w)

    arrays = replicated(devices, (512, 512), (4, 512, 512), dtype=jnp.bfloat16)
    return jax.jit(stacked).lower(*arrays)


DOUBLE_MATMUL = Miscompile(
    name='matmuls that run twice',
    what='the same matmul of the same operands runs twice: correct results, but lost time',
    where='a cuBLAS matmul in lax.scan whose result is read and saved for the backward pass',
    platform='gpu',
    source='seen with jax 0.11.2',
    effect='slow',
    detect=detect,
    repro=Repro(num_devices=1, lower=_lower, options={'xla_gpu_enable_triton_gemm': False}),
    workaround={'xla_gpu_enable_dynamic_slice_fusion': False},
    remedy='set the compiler option xla_gpu_enable_dynamic_slice_fusion=False',
)
