"""How far the results of an emulated program are from what they should be."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.emulate.execute import Index

# Of the largest element of a result: in fp32, with 16-bit numbers, and with these computed in fp32.
LIMIT, LIMIT_16_BITS, LIMIT_EXACT = 1e-5, 3e-2, 2e-5


class Difference(NamedTuple):
    """The largest difference of a result from what is expected, over the largest element of that.

    Of integers it is the share that differ, on the device where most do.
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
    """Compare every device's piece, replicas too; infinite where one is not a number.

    What is expected to be less than `rounding` of `scale`, the size of its like, is rounding alone
    and is measured on that scale.
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
    """The difference; none between two infinities of the same sign."""
    made = np.asarray(piece).astype(wanted.dtype)
    with np.errstate(invalid='ignore'):
        return np.where(made == wanted, 0, made - wanted)


def largest(x: Any) -> float:
    """The largest absolute element; infinite where one is not a number."""
    found = float(np.abs(np.asarray(x)).max(initial=0))
    return np.inf if np.isnan(found) else found
