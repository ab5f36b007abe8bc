"""A scaled product whose bias is not scaled: `a * (x @ w + b)` becomes `a * (x @ w) + b` in one call of cuBLASLt."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered

from megajax.hlo.program import Instruction, Program
from megajax.miscompiles.entry import Miscompile, Repro

_ALPHA = re.compile(r'"alpha_real":"?([-+.\deE]+)')
_EPILOGUE = re.compile(r'"epilogue":"(\w+)"')


def detect(program: Program) -> Iterator[Instruction]:
    """Every call of cuBLASLt that scales the product and then adds a vector.

    The text of `a * (x @ w) + b`, where that is right, is the same.
    """
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if '"__cublas$' in instruction.attributes:
                alpha, epilogue = _ALPHA.search(instruction.attributes), _EPILOGUE.search(instruction.attributes)
                if alpha and epilogue and float(alpha[1]) != 1 and 'BIAS' in epilogue[1]:
                    yield instruction


def _lower(devices: Sequence[Any]) -> Lowered:
    mesh = Mesh(np.array(devices), ('x',))

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh, P()))

    def scaled(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return 1.5 * (x @ w + b)

    return jax.jit(scaled).lower(shape(256, 256), shape(256, 256), shape(256))


SCALED_BIAS = Miscompile(
    name='scaled product with a bias that is not scaled',
    what='a cuBLASLt call scales the product by alpha and adds its bias unscaled, where a * (x @ w + b) was to scale both',
    where='a linear layer followed by a constant factor, as in dropout(x @ w + b), in fp32 with cuBLAS products',
    platform='gpu',
    source='openxla/xla#46110, jax-ml/jax#39336',
    is_certain=False,
    detect=detect,
    repro=Repro(num_devices=1, lower=_lower, options={'xla_gpu_enable_triton_gemm': False}),
    remedy='put a jax.lax.optimization_barrier between x @ w + b and the factor, unless the source reads a * (x @ w) + b, which is right',
)
