"""A number has the unit in which its rounded value is written without an exponent."""

from collections.abc import Callable

import pytest

from megajax.base.render.units import duration, large, rounded, si


@pytest.mark.parametrize(
    ('write', 'number', 'text'),
    [
        (duration, 0.0123, '12.3 ms'),
        (duration, 0.9994, '999 ms'),
        (duration, 0.9997, '1.0 s'),
        (duration, 99.94, '99.9 s'),
        (duration, 99.96, '1 min 40 s'),
        (duration, 3599.7, '1 h 0 min'),
        (large, 999_999, '999,999'),
        (large, 4_462_000, '4.46 M'),
        (large, 999_400_000, '999 M'),
        (large, 999_700_000, '1 B'),
        (large, 999.4e9, '999 B'),
        (large, 999.9e9, '1 T'),
        (rounded, 0.0123, '0.0123'),
        (rounded, 412.345, '412'),
        (rounded, 999.4, '999'),
        (rounded, 999.6, '1,000'),
        (rounded, 2048, '2,048'),
        (rounded, -123_456.7, '-123,457'),
        (rounded, 2.5e12, '2.5e+12'),
        (rounded, float('nan'), 'nan'),
        (si, 999, '999 B'),
        (si, 999.6, '1.0 kB'),
        (si, 999_940, '999.9 kB'),
        (si, 999_960, '1.0 MB'),
        (si, 25.4e9, '25.4 GB'),
        (si, 999_990_000_000, '1.0 TB'),
    ],
)
def test_the_unit_is_that_of_the_rounded_number(
    write: Callable[[float], str], number: float, text: str
) -> None:
    assert write(number) == text
