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
from megajax.xla.miscompiles.trace import Place, trace


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every integer constant that the program returns with the path of a top-k."""
    root = Place(program.entry, program.entry.root)
    is_tuple = root.instruction.opcode == 'tuple'
    count = len(root.instruction.operands)
    for place in [root.operand(index) for index in range(count)] if is_tuple else [root]:
        origin = trace(program, place).instruction
        is_constant = origin.opcode in ('broadcast', 'constant')
        is_top_k = origin.op_name.endswith('/top_k')
        if is_constant and is_top_k and origin.results[0].dtype == 's32':
            yield origin


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
