"""An embedding gradient sliced before it is summed: rows get the gradients of other rows."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Lowered

from megajax.xla.hlo.errors import HloError
from megajax.xla.hlo.groups import device_groups
from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro
from megajax.xla.miscompiles.trace import Place, integer, places, trace

VOCAB, WIDTH, BATCH, LENGTH = 64, 16, 4, 16
_REDUCTIONS = ('all-reduce', 'all-reduce-start', 'reduce-scatter')
_CONVERT = frozenset({'convert'})
_SUMMED = frozenset({'convert', 'all-reduce', 'all-reduce-start'})


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every sum to which each device adds a different slice of its scattered gradients."""
    for place in places(program):
        if place.instruction.opcode in _REDUCTIONS and _adds_other_slices(program, place):
            yield place.instruction


def _adds_other_slices(program: Program, place: Place) -> bool:
    operands = [place.operand(index) for index in range(len(place.instruction.operands))]
    return any(_is_other_slice(program, operand, place.instruction) for operand in operands)


def _is_other_slice(program: Program, operand: Place, reduction: Instruction) -> bool:
    sliced = trace(program, operand, through=_SUMMED)
    if sliced.instruction.opcode != 'dynamic-slice':
        return False
    if trace(program, sliced.operand(0), through=_CONVERT).instruction.opcode != 'scatter':
        return False
    starts = [sliced.operand(index) for index in range(1, len(sliced.instruction.operands))]
    groups = _groups(reduction, program.num_devices)
    return any(_differs(program, start, group) for start in starts for group in groups)


def _groups(reduction: Instruction, num_devices: int) -> tuple[tuple[int, ...], ...]:
    try:
        return device_groups(reduction, num_devices)
    except HloError:
        return ()


def _differs(program: Program, start: Place, group: tuple[int, ...]) -> bool:
    places = {integer(program, start, device) for device in group}
    return None not in places and len(places) > 1


def lower(devices: Sequence[Any], *, reduced: bool = True) -> Lowered:
    """Return a lookup's gradient: tokens sharded over both axes, the table over the first of 2."""
    grid = np.array(devices).reshape(2, -1)
    mesh = Mesh(grid, ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)

    def shape(sizes: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        if reduced:
            table = jax.reshard(table, P('data', None, reduced={'model'}))
        return (table.at[ids].get(out_sharding=P('data', 'model', None)) * weights).sum()

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss)).lower(
            shape((VOCAB, WIDTH), jnp.float32, 'data', None),
            shape((BATCH, LENGTH), jnp.int32, 'data', 'model'),
            shape((BATCH, LENGTH, WIDTH), jnp.float32, 'data', 'model', None),
        )


SLICED_SCATTER = Miscompile(
    name='an embedding gradient sliced before it is summed',
    what='devices add different slices, so rows of a table get the gradients of other rows',
    where="a lookup in a table P('data', None, reduced={'model'}) by tokens over data; on CPUs too",
    platform='gpu',
    source='openxla/xla#42481',
    detect=detect,
    repro=Repro(num_devices=4, lower=lower),
    remedy='use a table of P(None, None, reduced=...), or leave out `reduced`',
)
