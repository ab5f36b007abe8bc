"""The error of an emulated program's results, compared with the expected ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.emulate.execute import Index

# Limits of the error, relative to the largest element of a result: for fp32, for 16-bit numbers,
# and for 16-bit numbers that are computed in fp32.
LIMIT, LIMIT_16_BITS, LIMIT_EXACT = 1e-5, 3e-2, 2e-5


class Difference(NamedTuple):
    """The largest error of a result, relative to the largest element of the expected array.

    For integers, the share of elements that differ, on the device where most differ.
    """

    name: str
    error: float


def difference(
    name: str,
    pieces: Sequence[tuple[Index, np.ndarray]],
    expected: Any,
    *,
    scale: float = 0.0,
    rounding: float = 0.0,
) -> Difference:
    """Compare every device's piece, replicas included, with the expected array.

    The error is infinite if an element is not a number. If no expected element exceeds `rounding`
    times `scale`, the size of comparable arrays, the result consists of rounding errors and the
    error is relative to `scale`.
    """
    wanted = np.asarray(expected)
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        shares = [np.mean(piece != wanted[place]) for place, piece in pieces if piece.size]
        return Difference(name, float(max(shares, default=0)))
    is_complex = jnp.issubdtype(wanted.dtype, jnp.complexfloating)
    wanted = wanted.astype(np.complex128 if is_complex else np.float64)
    worst = max(largest(_apart(piece, wanted[place])) for place, piece in pieces)
    own = largest(wanted[np.isfinite(wanted)])
    scale = own if own > rounding * scale else scale
    error = worst / scale if scale and worst else worst
    return Difference(name, np.inf if np.isnan(error) else error)


def _apart(piece: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The element-wise difference; zero between two infinities of the same sign."""
    actual = np.asarray(piece).astype(wanted.dtype)
    with np.errstate(invalid='ignore'):
        return np.where(actual == wanted, 0, actual - wanted)


def largest(x: Any) -> float:
    """The largest absolute element; infinite if an element is not a number."""
    maximum = float(np.abs(np.asarray(x)).max(initial=0))
    return np.inf if np.isnan(maximum) else maximum
