"""The error of an emulated program's results, compared with the expected results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from megajax.xla.emulate.execute import Index

# Limits of the error, relative to the largest element of a result: for fp32, for 16-bit types, for
# FP8, and for 8- and 16-bit types that are computed in fp32.
LIMIT, LIMIT_16_BITS, LIMIT_8_BITS, LIMIT_EXACT = 1e-5, 3e-2, 0.4, 2e-5
# Two 16-bit programs round differently. An error may be MARGIN times the rounding error on one
# device, in the largest element and in the norm. The norm of fewer than FEW elements is not
# reliable.
MARGIN, NORM_FLOOR, FEW = 2.0, 1e-2, 16
# The logarithm of the ratio of two norms of n normal errors has the standard deviation 1 / sqrt(n).
SIGMAS = 3.0
# The fp32 programs of 16 correct steps have at most 2.9 times the error that nudged inputs cause.
MARGIN_IN_FP32 = 6.0
# If several elements are equally large, and all others smaller by this factor, they are a fill
# value, such as the -1e9 of a mask.
FILL = 1e-3
WHOLE: Index = ()


class Difference(NamedTuple):
    """The largest error of a result, relative to the largest element of the expected array.

    For integers, it is the share of elements that differ, on the device where most differ.
    """

    name: str
    error: float
    limit: float | None = None  # limit of this result, if it depends on rounding
    note: str = ''  # what was not compared, and why


def difference(
    name: str,
    pieces: Sequence[tuple[Index, np.ndarray]],
    expected: Any,
    *,
    scale: float = 0.0,
    rounding: float = 0.0,
) -> Difference:
    """Compare every device's piece, replicas included, with the expected array.

    The error is infinite if an element is not a number. `scale` is the magnitude of comparable
    arrays. If no expected element exceeds `rounding` times `scale`, the result consists of rounding
    errors, and the error is relative to `scale`. Elements with a fill value have an error of their
    own, relative to that value; the larger error counts.
    """
    wanted = np.asarray(expected)
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        shares = [np.mean(piece != wanted[place]) for place, piece in pieces if piece.size]
        return Difference(name, float(max(shares, default=0)))
    is_complex = jnp.issubdtype(wanted.dtype, jnp.complexfloating)
    wanted = wanted.astype(np.complex128 if is_complex else np.float64)
    is_fill = _is_fill(wanted)
    errors = []
    for part in (~is_fill, is_fill):
        worst = max(
            largest(np.where(part[place], _apart(piece, wanted[place]), 0))
            for place, piece in pieces
        )
        own = largest(wanted[part & np.isfinite(wanted)])
        size = own if own > rounding * scale else scale
        errors.append(worst / size if size and worst else worst)
    return Difference(name, np.inf if np.isnan(errors).any() else max(errors))


def _is_fill(wanted: np.ndarray) -> np.ndarray:
    """Return where a fill value is that hides the magnitude of all other elements."""
    sizes = np.abs(np.where(np.isfinite(wanted), wanted, 0))
    extreme = sizes.max(initial=0)
    is_extreme = sizes == extreme
    rest = sizes.max(initial=0, where=~is_extreme)
    return is_extreme & (is_extreme.sum() > 1) & (0 < rest < FILL * extreme)


def difference_in_fp32(
    name: str,
    pieces: Sequence[tuple[Index, np.ndarray]],
    expected: Any,
    nudged: Any,
    *,
    recompiled: Any = None,
    floor: float,
    scale: float = 0.0,
    rounding: float = 0.0,
) -> Difference:
    """Compare every device's piece with the expected array if both are computed in fp32.

    `nudged` is the array if inputs differ in their last bits, and `recompiled` the array of another
    compilation of the same program, if there is one. The error may be `floor` or, if a result
    depends that much on rounding, MARGIN_IN_FP32 times the distance of `nudged` or MARGIN times the
    distance of `recompiled`.
    """
    size = {'scale': scale, 'rounding': rounding}

    def explained(other: Any) -> float:
        return difference(name, [(WHOLE, np.asarray(other))], expected, **size).error

    limit = _limit(floor, MARGIN_IN_FP32 * explained(nudged))
    if recompiled is not None:
        limit = _limit(limit, MARGIN * explained(recompiled))
    return difference(name, pieces, expected, **size)._replace(limit=limit)


def difference_of_rounded(
    name: str,
    pieces: Sequence[tuple[Index, np.ndarray]],
    expected: Any,
    precise: Any,
    *,
    floor: float,
    scale: float = 0.0,
    rounding: float = 0.0,
    margin: float = MARGIN,
    also: Sequence[tuple[Any, Any]] = (),
) -> Difference:
    """Compare every device's piece with the expected array if both are rounded to 16 bits.

    `precise` is the array in fp32. Rounding explains its distance from `expected`, and the distance
    of the arrays in each pair of `also`; the largest distance counts. A single element may differ
    from the expected element by `floor` or by a multiple of that distance. The norm of the error is
    also compared with the norm of that distance, because a small fault in many elements changes the
    norm more than rounding does. Returns the worse of the two comparisons, with its limit.
    """
    size = {'scale': scale, 'rounding': rounding}
    elements = difference(name, pieces, expected, **size)
    pairs = [([(WHOLE, np.asarray(x))], y) for x, y in ((expected, precise), *also)]
    explained = max(difference(name, rounded, y, **size).error for rounded, y in pairs)
    elements = elements._replace(limit=_limit(floor, margin * explained))
    if largest(precise) <= rounding * scale or np.size(precise) < FEW:
        return elements
    explained = max(_norm(rounded, y) for rounded, y in pairs)
    margin *= max(1.0, _spread(np.asarray(expected), np.asarray(precise)) / MARGIN)
    norm = Difference(name, _norm(pieces, precise), _limit(NORM_FLOOR, margin * explained))
    return max(elements, norm, key=lambda result: result.error / (result.limit or 1))


def nudged(x: np.ndarray, share: float, seed: int = 0) -> np.ndarray:
    """Return floating-point numbers that each differ by up to this share of themselves."""
    factors = np.random.default_rng(seed).uniform(1 - share, 1 + share, x.shape)
    return np.asarray(x * factors, x.dtype)


def inexact(arrays: Sequence[np.ndarray]) -> set[int]:
    """Return the indices of the arrays whose last digits are rounded.

    Masks, ids and other whole numbers are exact: a mask of 0.9999999 would change the meaning of
    `(1 - mask) * -1e9`. If all arrays are whole numbers, only masks of zeros and ones are exact.
    """
    floats = {
        place for place, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact) and x.size
    }
    whole = {place for place in floats if (arrays[place] == np.rint(arrays[place])).all()}
    if whole < floats:
        return floats - whole
    return {place for place in floats if not np.isin(arrays[place], (0, 1)).all()}


def _limit(floor: float, explained: float) -> float:
    """Return the larger one; results that are not numbers explain no error."""
    return max(floor, explained) if np.isfinite(explained) else floor


def _norm(pieces: Sequence[tuple[Index, np.ndarray]], expected: Any) -> float:
    """Return the norm of the errors of all pieces, relative to the norm of the expected values."""
    wanted = np.asarray(expected, np.float64)
    error = sum(np.sum(np.square(piece.astype(np.float64) - wanted[at])) for at, piece in pieces)
    size = sum(np.sum(np.square(wanted[at])) for at, _ in pieces)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


def _spread(expected: np.ndarray, precise: np.ndarray) -> float:
    """Return how many times larger than another a norm of rounding errors can be by chance.

    It is more than MARGIN if few elements have nearly all of the error.
    """
    squares = np.square(_apart(expected, precise.astype(np.float64)))
    fourth = np.sum(np.square(squares))
    if not fourth or not np.isfinite(fourth):
        return 1.0
    effective = 3 * np.sum(squares) ** 2 / fourth  # the number of elements, for normal errors
    return float(np.exp(SIGMAS / np.sqrt(effective)))


def _apart(piece: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the element-wise difference; zero between two infinities of the same sign."""
    actual = np.asarray(piece).astype(wanted.dtype)
    with np.errstate(invalid='ignore'):
        return np.where(actual == wanted, 0, actual - wanted)


def largest(x: Any) -> float:
    """Return the largest absolute element; infinite if an element is not a number."""
    maximum = float(np.abs(np.asarray(x)).max(initial=0))
    return np.inf if np.isnan(maximum) else maximum
