"""How far the results of an emulated program are from what they should be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.emulate.execute import Index


class Difference(NamedTuple):
    """The largest difference of a result from what is expected, over the largest element of that.

    Of integers it is the share that differ, on the device where most do.
    """

    name: str
    error: float


def difference(name: str, pieces: Sequence[tuple[Index, np.ndarray]], expected: Any) -> Difference:
    """Compare every device's piece, replicas too; infinite where one is not a number."""
    wanted = np.asarray(expected)
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        shares = [np.mean(piece != wanted[place]) for place, piece in pieces if piece.size]
        return Difference(name, float(max(shares, default=0)))
    is_complex = jnp.issubdtype(wanted.dtype, jnp.complexfloating)
    wanted = wanted.astype(np.complex128 if is_complex else np.float64)
    worst = max(_largest(_apart(piece, wanted[place])) for place, piece in pieces)
    scale = _largest(wanted[np.isfinite(wanted)])
    return Difference(name, worst / scale if scale and worst else worst)


def _apart(piece: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The difference; none between two infinities of the same sign."""
    made = piece.astype(wanted.dtype)
    with np.errstate(invalid='ignore'):
        return np.where(made == wanted, 0, made - wanted)


def _largest(x: np.ndarray) -> float:
    largest = float(np.abs(x).max(initial=0))
    return np.inf if np.isnan(largest) else largest
