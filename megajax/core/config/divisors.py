"""Divisors and multiples, for the fixes that an error message offers."""

import bisect
import functools
import math
from collections.abc import Iterator, Sequence

from megajax.base.errors import Problem


def divides(
    path: str,
    value: int,
    by: str,
    divisor: int,
    *,
    under: str | None = None,
    allowed: Sequence[int] | None = None,
) -> Iterator[Problem]:
    """Yield a problem unless the value of the key `by` divides the value of the key `path`.

    The problem offers the nearest values of `by` that are `allowed`, by default all divisors.
    """
    if value % divisor:
        near = nearest(divisors(value) if allowed is None else allowed, divisor)
        fixes = f'{multiples(value, divisor)}, or {by} {near}'
        limit = f'{by}={divisor}' + (f' under {under}' if under else '')
        yield Problem(
            path,
            f'{value} is not a multiple of {limit}; use {fixes}',
            others=(by, under) if under else (by,),
        )


def multiples(value: int, divisor: int) -> str:
    """Return the multiples of a divisor nearest to a value, as text."""
    below = value // divisor * divisor
    return f'{below} or {below + divisor}' if below else str(divisor)


@functools.cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def nearest(allowed: Sequence[int], value: int) -> str:
    """Return the neighbors of a value in `allowed`, as text.

    `allowed` is an ascending sequence that does not contain the value.
    """
    at = bisect.bisect(allowed, value)
    return ' or '.join(str(n) for n in allowed[max(0, at - 1) : at + 1])
