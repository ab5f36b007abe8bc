"""Ring permutes that lose data: a permute of several cycles is split, and only one is rejoined."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro
from megajax.xla.miscompiles.trace import Place, integer, places, trace

_PAIRS = re.compile(r'source_target_pairs="?=?"?\{((?:\{\d+,\d+\},?)*)\}')
_WITH_BROADCAST = frozenset({'broadcast'})


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every select that gives a device the one of two permutes that sends it nothing."""
    for place in places(program):
        if place.instruction.opcode == 'select' and _loses_data(program, place):
            yield place.instruction


def _loses_data(program: Program, select: Place) -> bool:
    chosen, otherwise = (_targets(program, select.operand(index)) for index in (1, 2))
    if chosen is None or otherwise is None:
        return False
    device = _device_of(program, select.operand(0))
    return device is not None and bool(chosen - otherwise - {device})


def _targets(program: Program, place: Place) -> set[int] | None:
    """Return the devices that receive data from a permute, or from the receive that replaced it."""
    instruction = trace(program, place).instruction
    if instruction.opcode not in ('recv', 'collective-permute', 'collective-permute-start'):
        return None
    pairs = _PAIRS.search(instruction.attributes)
    return {int(target) for target in re.findall(r'\{\d+,(\d+)\}', pairs[1])} if pairs else None


def _device_of(program: Program, place: Place) -> int | None:
    """Return the device of a condition `partition-id == constant`; None for other conditions."""
    place = trace(program, place, through=_WITH_BROADCAST)
    if place.instruction.opcode != 'compare' or 'direction=EQ' not in place.instruction.attributes:
        return None
    through = _WITH_BROADCAST | {'convert'}
    sides = [trace(program, place.operand(index), through=through) for index in (0, 1)]
    opcodes = {side.instruction.opcode for side in sides}
    if 'constant' not in opcodes or not opcodes & {'partition-id', 'replica-id'}:
        return None
    constants = [side for side in sides if side.instruction.opcode == 'constant']
    return integer(program, constants[0], 0)


def _lower(devices: Sequence[Any]) -> Lowered:
    """Return a ring along one of two axes, in a loop: two cycles of two devices."""
    mesh = Mesh(np.array(devices).reshape(2, 2), ('a', 'b'))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P('a', 'b'), out_specs=P('a', 'b'), check_vma=False)
    def ring(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return 2 * lax.ppermute(x, 'b', [(0, 1), (1, 0)]), None

        return lax.scan(turn, x, length=4)[0]

    sharding = NamedSharding(mesh, P('a', 'b'))
    return ring.lower(jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=sharding))


SPLIT_CYCLES = Miscompile(
    name='ring permutes that lose data',
    what='a permute of several cycles is split, and devices that close a cycle receive zeros',
    where='lax.ppermute around one of several mesh axes, with xla_gpu_enable_pipelined_p2p',
    platform='gpu',
    source='openxla/xla#45222',
    detect=detect,
    repro=Repro(
        num_devices=4,
        lower=_lower,
        options={
            'xla_gpu_enable_pipelined_p2p': True,
            'xla_gpu_collective_permute_decomposer_threshold': '0',
        },
    ),
    workaround={'xla_gpu_enable_pipelined_p2p': False},
    remedy='remove xla_gpu_enable_pipelined_p2p',
)
