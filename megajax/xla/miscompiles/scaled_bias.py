"""A bias that is not scaled: `a * (x @ w + b)` becomes `a * (x @ w) + b` in cuBLASLt."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from megajax.xla.hlo.program import Instruction, Program
from megajax.xla.miscompiles.entry import Miscompile, Repro, replicated
from megajax.xla.miscompiles.trace import places

_ALPHA = re.compile(r'"alpha_real":"?([-+.\deE]+)')
_EPILOGUE = re.compile(r'"epilogue":"(\w+)"')


def detect(program: Program) -> Iterator[Instruction]:
    """Yield every cuBLASLt call that scales the matmul and then adds a vector.

    The correct program `a * (x @ w) + b` has the same text.
    """
    for _, instruction in places(program):
        if '"__cublas$' in instruction.attributes:
            alpha = _ALPHA.search(instruction.attributes)
            epilogue = _EPILOGUE.search(instruction.attributes)
            if alpha and epilogue and float(alpha[1]) != 1 and 'BIAS' in epilogue[1]:
                yield instruction


def _lower(devices: Sequence[Any]) -> Lowered:
    def scaled(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return 1.5 * (x @ w + jnp.expand_dims(b, 0))

    return jax.jit(scaled).lower(*replicated(devices, (256, 256), (256, 512), (512,)))


SCALED_BIAS = Miscompile(
    name='scaled matmul whose bias is not scaled',
    what='a cuBLASLt call adds its bias unscaled, but a * (x @ w + b) scales it too',
    where='a constant factor after a linear layer, as in dropout(x @ w + b), in cuBLAS matmuls',
    platform='gpu',
    source='openxla/xla#46110, jax-ml/jax#39336',
    is_certain=False,
    detect=detect,
    repro=Repro(num_devices=1, lower=_lower, options={'xla_gpu_enable_triton_gemm': False}),
    remedy='put jax.lax.optimization_barrier before the factor, unless it is a * (x @ w) + b',
)
