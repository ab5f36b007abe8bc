"""A bias along the wrong dim: `(x @ w + b).T` of a square matmul adds b to the rows."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.hlo.starts import results_of
from megajax.xla.miscompiles.entry import Miscompile, Repro, replicated
from megajax.xla.miscompiles.trace import places

_BIAS = re.compile(r'"epilogue":"\w*BIAS')


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every cuBLASLt call that adds a vector to a square matmul.

    The text does not show the dim along which the vector should be added.
    """
    for home, instruction in places(program):
        if '"__cublas$' in instruction.attributes and _BIAS.search(instruction.attributes):
            sizes = results_of(home, instruction)[0].shape[-2:]
            if len(sizes) == 2 and len({*sizes}) == 1:
                yield instruction


def _lower(devices: Sequence[Any]) -> Lowered:
    def transposed(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return (x @ w + jnp.expand_dims(b, 0)).T

    return jax.jit(transposed).lower(*replicated(devices, (32, 64), (64, 32), (32,)))


MISPLACED_BIAS = Miscompile(
    name='bias along the wrong dim of a square matmul',
    what='a cuBLASLt call adds its bias to a square matmul, possibly along the wrong dim',
    where=(
        'a linear layer with as many tokens as features whose result is transposed, '
        'in cuBLAS matmuls'
    ),
    platform='gpu',
    source='openxla/xla#46897',
    is_certain=False,
    detect=detect,
    repro=Repro(num_devices=1, lower=_lower, options={'xla_gpu_enable_triton_gemm': False}),
    remedy=(
        'put jax.lax.optimization_barrier before the bias, '
        'or execute the program (megajax.inspect.run)'
    ),
)
