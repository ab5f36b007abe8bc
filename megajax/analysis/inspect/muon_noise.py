"""Matrices that Muon updates by rounding errors alone.

Muon orthogonalizes the gradient of each matrix, whatever its norm. If the exact gradient is zero,
as of queries and keys with a window of one token, each program has rounding errors of its own, and
Muon turns them into an update of the usual size. Such updates cannot be compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dim_sizes, parameters
from megajax.core.counts.whole_matrices import parts_of
from megajax.core.parallel.layout import Layout
from megajax.xla.emulate.execute import Index

Pieces = Sequence[tuple[Index, np.ndarray]]


class Noise(NamedTuple):
    """The elements of a parameter whose update is undetermined, and why they are."""

    mask: np.ndarray | None = None  # None if all updates are determined
    note: str = ''

    def without(self, x: np.ndarray, place: Index = ()) -> np.ndarray:
        """Return an array, or its piece at `place`, with zeros where numbers are undetermined."""
        if self.mask is None:
            return x
        return np.where(self.mask[place] & np.isfinite(x), 0, x).astype(x.dtype)


def orthogonalized(config: Config) -> dict[str, Parameter]:
    """Return the parameters of which Muon orthogonalizes matrices, by name."""
    if config.optim.kind != 'muon':
        return {}
    return {
        name: declared
        for name, declared in parameters(config.model)
        if declared.is_layer_matrix and not declared.is_frozen
    }


def noise_of(
    config: Config,
    declared: Parameter,
    executed: Pieces,
    expected: np.ndarray,
    exact: np.ndarray,
    limits: tuple[float, float],
) -> Noise:
    """Return what is undetermined of the update of a parameter.

    A matrix's update is undetermined if no element of its `exact` gradient, of one device in fp32,
    exceeds the first limit, and none of its executed gradient the second. It is determined if the
    executed and the `expected` gradient are both zero.
    """
    found = np.zeros(exact.shape)
    for place, piece in executed:
        found[place] = np.maximum(found[place], np.abs(piece.astype(np.float64)))
    mask, count = np.zeros(exact.shape, bool), 0
    for part in parts_of(declared, dim_sizes(config.model), Layout.of(config)):
        at = [slice(None)] * exact.ndim
        if part.fused is not None:
            at[part.fused] = slice(part.start, part.stop)
        sizes = [
            np.abs(x[(*at,)]).max(part.order[len(part.batch) :], keepdims=True)
            for x in (exact, found, expected)
        ]
        is_noise = (sizes[0] <= limits[0]) & (sizes[1] <= limits[1]) & (sizes[1] + sizes[2] > 0)
        mask[(*at,)] |= is_noise
        count += int(is_noise.sum())
    if not count:
        return Noise()
    norms = [float(np.linalg.norm(x[mask].astype(np.float64))) for x in (exact, found)]
    note = (
        f'undetermined in {count} matrices: Muon orthogonalizes a gradient of rounding errors '
        f'(norm {norms[0]:.1e} on one device, {norms[1]:.1e} executed)'
    )
    return Noise(mask, note)
