"""MXFP4, the format of gpt-oss's experts: blocks of 32 4-bit numbers that share a scale.

OCP's Microscaling Formats 1.0 defines it. Imports no jax.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from megajax.core.config import ConfigError

BLOCK = 32  # numbers; a byte has two, the first in its lower half
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCKS, SCALES = '_blocks', '_scales'  # name endings of the two parts of a packed tensor

_BYTES = np.arange(256, dtype=np.uint8)
_PAIRS = np.stack([_BYTES & 15, _BYTES >> 4], -1).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_FACTORS = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


class Packed:
    """A tensor [expert, in, out] whose blocks along `in` are unpacked into bf16 when it is read.

    bf16 represents each value exactly, unless the value is outside the range of bf16.
    """

    dtype = BFLOAT16

    def __init__(self, blocks: np.ndarray, scales: np.ndarray):
        self.blocks, self.scales = blocks, scales
        experts, outputs, count, _ = blocks.shape
        self.shape = experts, count * BLOCK, outputs

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Return the unpacked values."""
        return self.unpack(tuple(slice(0, size) for size in self.shape))

    def unpack(self, box: tuple[slice, ...]) -> np.ndarray:
        """Return an array of the tensor's shape in which the values of a box are unpacked.

        The other values are undefined.
        """
        experts, inputs, outputs = box
        count = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        whole = slice(count.start * BLOCK, count.stop * BLOCK)
        values = np.empty((self.shape[0], self.shape[2], self.shape[1]), BFLOAT16)
        # Overflow gives infinity; an import then fails and names the tensor.
        with np.errstate(over='ignore'):
            for expert in range(experts.start, experts.stop):
                pairs = _PAIRS[self.blocks[expert, outputs, count]]
                factors = _FACTORS[self.scales[expert, outputs, count]]
                unpacked = pairs.reshape(*factors.shape, BLOCK) * factors[..., None]
                values[expert, outputs, whole] = unpacked.reshape(len(unpacked), -1)
        return values.swapaxes(1, 2)


def unpack(tensors: Mapping[str, np.ndarray], source: str) -> dict[str, Any]:
    """Return the tensors, with each pair of blocks and scales combined into one tensor.

    Raises ConfigError, which names `source`, for parts that do not fit together.
    """
    found: dict[str, Any] = dict(tensors)
    for name in tensors:
        whole = name.removesuffix(BLOCKS)
        if whole == name or whole + SCALES not in tensors or whole in tensors:
            continue  # the parts of this tensor will be reported as unexpected
        blocks, scales = found.pop(name), found.pop(whole + SCALES)
        if blocks.ndim != 4 or blocks.shape != (*scales.shape, BLOCK // 2):
            raise ConfigError(
                f'{source}: {name}: {blocks.shape} does not fit {whole}{SCALES}, {scales.shape}: '
                f'MXFP4 has one scale for {BLOCK // 2} bytes'
            )
        for part, x in ((name, blocks), (whole + SCALES, scales)):
            if x.dtype != np.uint8:
                raise ConfigError(f'{source}: {part}: expected uint8, got {x.dtype}')
        found[whole] = Packed(blocks, scales)
    return found
