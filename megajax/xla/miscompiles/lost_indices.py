"""XLA returns zeros for the indices of a sharded top-k, if a program returns them unchanged."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro
from megajax.xla.miscompiles.trace import Place, places, trace

CHOOSE = 'sort', 'topk', 'custom-call'


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every integer constant that the program returns with the path of a top-k."""
    root = Place(program.entry, program.entry.root)
    is_tuple = root.instruction.opcode == 'tuple'
    count = len(root.instruction.operands)
    for place in [root.operand(index) for index in range(count)] if is_tuple else [root]:
        origin = trace(program, place).instruction
        is_constant = origin.opcode in ('broadcast', 'constant')
        is_top_k = origin.op_name.endswith('/top_k')
        is_index = origin.results[0].dtype == 's32'
        if is_constant and is_top_k and is_index and _chooses(program, origin):
            yield origin


def _chooses(program: Program, origin: Instruction) -> bool:
    """Return whether a top-k chooses among several elements: the only one has the index 0.

    The program of a top-k among one element has no instruction that chooses.
    """
    shape = origin.results[0].shape
    return bool(shape and shape[-1] > 1) or any(
        instruction.opcode in CHOOSE and instruction.op_name == origin.op_name
        for _, instruction in places(program)
    )


def _lower(devices: Sequence[Any]) -> Lowered:
    mesh = Mesh(np.array(devices), ('data',))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P('data')))
    return jax.jit(lambda x: jax.lax.top_k(x, 2)).lower(x)


LOST_INDICES = Miscompile(
    name='zero indices from a sharded top-k',
    what='the program returns zeros for the indices of the largest elements; the values are right',
    where='a sharded jax.lax.top_k whose indices a program returns unchanged',
    platform='gpu',
    source='openxla/xla#49005',
    detect=detect,
    repro=Repro(num_devices=2, lower=_lower),
    # Disabling the pass that causes this would also disable XLA's own kernel for small k.
    remedy=(
        'constrain the sharding of both results, '
        'or set the compiler option xla_disable_hlo_passes=topk-rewriter'
    ),
)
