"""The error of a result is the worst over its devices, measured against what it should be."""

import numpy as np
import pytest

from megajax.emulate.compare import difference, largest

FIRST, SECOND = (slice(0, 2),), (slice(2, 4),)


def test_the_worst_device_counts_and_each_is_compared_with_its_own_part():
    wanted = np.array([1.0, 2.0, 3.0, 4.0])
    made = [(FIRST, [1.0, 2.0]), (SECOND, [3.0, 5.0]), (SECOND, [3.0, 4.0])]
    for dtype, error in ((float, 1 / 4), (int, 1 / 2)):
        pieces = [(place, np.array(piece, dtype)) for place, piece in made]
        assert difference('x', pieces, wanted.astype(dtype)).error == pytest.approx(error)


def test_what_is_rounding_alone_is_measured_on_the_scale_of_its_like():
    piece, wanted = [(FIRST, np.array([3e-7, 0.0]))], np.array([1e-7, 0.0])
    assert difference('x', piece, wanted).error == pytest.approx(2)
    assert difference('x', piece, wanted, scale=10.0, rounding=1e-6).error == pytest.approx(2e-8)
    assert difference('x', piece, wanted, scale=10.0, rounding=1e-9).error == pytest.approx(2)


def test_an_infinity_of_the_wrong_sign_or_that_should_be_a_number_is_infinitely_wrong():
    for made in ([np.inf, 1.0], [-np.inf, np.inf], [np.nan, 1.0]):
        assert difference('x', [(FIRST, np.array(made))], np.array([-np.inf, 1.0])).error == np.inf


def test_numbers_of_16_bits_are_compared_in_more_than_their_own_precision():
    wanted, made = np.array([2048.0]), np.array([2049.0])
    error = difference('x', [((slice(None),), made)], wanted.astype(np.float16)).error
    assert error == pytest.approx(1 / 2048)


def test_an_array_without_elements_is_right():
    for nothing in (np.zeros(0, np.float32), np.zeros(0, np.int32)):
        assert largest(nothing) == 0
        assert difference('x', [((slice(None),), nothing)], nothing).error == 0


def test_the_largest_element_has_no_sign_and_one_that_is_not_a_number_is_infinite():
    assert largest([1.0, -3.0, 2j]) == 3
    assert largest([1.0, np.nan]) == np.inf
