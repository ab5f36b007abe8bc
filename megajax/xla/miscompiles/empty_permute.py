"""A permute without pairs: where a device slices out its own shard, XLA returns zeros."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.stages import Lowered

from megajax.core.config import Config
from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro
from megajax.xla.miscompiles.trace import places

PASS = 'all-gather-to-collective-permute-simplifier'


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every permute in which no device sends, so that all of them receive zeros.

    A permute of the function itself may have no pairs: along an axis of one device, or by intent.
    """
    for _, instruction in places(program):
        is_permute = instruction.opcode in ('collective-permute', 'collective-permute-start')
        if (
            is_permute
            and not is_asked_for(instruction.op_name)
            and re.search(r'source_target_pairs=\{\s*\}', instruction.attributes)
        ):
            yield instruction


def is_asked_for(op_name: str) -> bool:
    """Return whether a permute with this path is one of the function itself."""
    return op_name.endswith('/ppermute')


def _lower(devices: Sequence[Any]) -> Lowered:
    """Return an array gathered over one of two axes, read, and sharded over it again."""
    grid = np.array(devices).reshape(2, 2)
    mesh = Mesh(grid, ('data', 'model'), axis_types=(AxisType.Explicit,) * 2)

    def gather_and_slice(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathered = jax.reshard(x, P('data', None, None))
        return gathered * 3, jax.reshard(gathered, P('data', 'model', None)) * 2

    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P('data', 'model', None))
        x = jax.ShapeDtypeStruct((4, 64, 32), jnp.float32, sharding=sharding)
        return jax.jit(gather_and_slice).lower(x)


def _affects(config: Config) -> bool:
    return not config.model.bias and config.mesh.sequence_parallel and config.mesh.data > 1


EMPTY_PERMUTE = Miscompile(
    name='permute without pairs',
    what='a permute without pairs returns zeros, although each device should keep its own shard',
    where='an array all-gathered over one of several mesh axes, read, and sharded over it again',
    platform='gpu',
    source='openxla/xla#45218',
    detect=detect,
    repro=Repro(num_devices=4, lower=_lower),
    workaround={'xla_disable_hlo_passes': PASS},
    remedy=f'set the compiler option xla_disable_hlo_passes={PASS}',
    affects=_affects,
    affected_keys=('mesh.sequence_parallel', 'model.bias', 'mesh.data'),
)
