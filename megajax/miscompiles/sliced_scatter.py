"""An embedding's gradient that is sliced before it is summed: rows of one shard are added to rows of another."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Lowered

from megajax.hlo.groups import device_groups
from megajax.hlo.program import HloError, Instruction, Program
from megajax.miscompiles.entry import Miscompile, Repro
from megajax.miscompiles.trace import Place, depends_on_device, integer, trace

VOCAB, WIDTH, BATCH, LENGTH = 64, 16, 4, 16
_ELEMENTWISE = frozenset({'convert', 'all-reduce', 'all-reduce-start'})


def detect(program: Program) -> Iterator[Instruction]:
    """Every sum over devices of which each adds another slice of what it has scattered."""
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.opcode in ('all-reduce', 'all-reduce-start', 'reduce-scatter') and instruction.operands:
                operands = (Place(computation, instruction).operand(index) for index in range(len(instruction.operands)))
                if any(_is_other_slice(program, operand, instruction) for operand in operands):
                    yield instruction


def _is_other_slice(program: Program, operand: Place, reduction: Instruction) -> bool:
    sliced = trace(program, operand, through=_ELEMENTWISE)
    if sliced.instruction.opcode != 'dynamic-slice':
        return False
    if trace(program, sliced.operand(0), through=frozenset({'convert'})).instruction.opcode != 'scatter':
        return False
    starts = [sliced.operand(index) for index in range(1, len(sliced.instruction.operands))]
    starts = [start for start in starts if depends_on_device(program, start)]
    return any(_differs(program, start, group) for start in starts for group in _groups(reduction))


def _groups(reduction: Instruction) -> tuple[tuple[int, ...], ...]:
    try:
        return device_groups(reduction, 1)
    except HloError:
        return ()


def _differs(program: Program, start: Place, group: tuple[int, ...]) -> bool:
    places = {integer(program, start, device) for device in group}
    return None not in places and len(places) > 1


def lower(devices: Sequence[Any], *, reduced: bool = True) -> Lowered:
    """The gradient of a lookup of tokens over both axes, in a table whose rows lie over the first one."""
    mesh = Mesh(np.array(devices).reshape(2, 2), ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)

    def shape(sizes: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    def loss(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        table = jax.reshard(table, P('data', None, reduced={'model'}) if reduced else P('data', None))
        return (table.at[ids].get(out_sharding=P('data', 'model', None)) * weights).sum()

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss)).lower(
            shape((VOCAB, WIDTH), jnp.float32, P('data', None)),
            shape((BATCH, LENGTH), jnp.int32, P('data', 'model')),
            shape((BATCH, LENGTH, WIDTH), jnp.float32, P('data', 'model', None)),
        )


SLICED_SCATTER = Miscompile(
    name="an embedding's gradient sliced before it is summed",
    what='each device adds another slice of what it has scattered, so rows of a table get the gradients of other rows',
    where="a lookup in a table of type P('data', None, reduced={'model'}), by tokens that lie over `data`; on CPUs too",
    platform='gpu',
    source='openxla/xla#42481',
    detect=detect,
    repro=Repro(num_devices=4, lower=lower),
    remedy='reshard the table to P(None, None, reduced=...) before the lookup, or leave out `reduced`',
)
