"""Copy arrays whose dims have a different order in memory. Imports no jax."""

import math

import numpy as np

# Elements along a tile's side, a cache line in fp32: numpy transposes tiles several times faster.
TILE = 16


def copy_tiles(target: np.ndarray, source: np.ndarray) -> None:
    """Assign target[...] = source, in tiles if one is transposed relative to the other."""
    along_target, along_source = _contiguous_dim(target), _contiguous_dim(source)
    if along_target == along_source:
        target[...] = source
        return
    target, source = (
        np.moveaxis(x, (along_source, along_target), (-2, -1)) for x in (target, source)
    )
    for outer in np.ndindex(target.shape[:-2]):
        for start in range(0, target.shape[-1], TILE):
            target[outer][:, start : start + TILE] = source[outer][:, start : start + TILE]


def _contiguous_dim(x: np.ndarray) -> int:
    steps = (step if size > 1 else math.inf for step, size in zip(x.strides, x.shape, strict=True))
    return int(np.argmin([*steps]))
