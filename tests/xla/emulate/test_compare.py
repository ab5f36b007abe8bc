"""The error of a result is the worst over its devices, measured against what it should be."""

import functools

import numpy as np
import pytest

from megajax.xla.emulate.compare import (
    LIMIT_16_BITS,
    MARGIN,
    MARGIN_IN_FP32,
    difference,
    difference_in_fp32,
    difference_of_rounded,
    largest,
)

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


@pytest.mark.parametrize('fill', [-1e9, float(np.finfo(np.float32).min)])
def test_a_fill_value_does_not_hide_the_errors_of_the_other_elements(fill):
    wanted = np.array([1.0, -2.0, fill, fill])
    for made, error in (
        ([1.0, -2.5, fill, fill], 0.25),
        ([1.0, -2.0, fill, 0.5 * fill], 0.5),
        ([1.0, -2.0, fill, 1.0], 1.0),
        ([fill, -2.0, fill, fill], abs(fill) / 2),
        ([1.0, np.nan, fill, fill], np.inf),
        ([1.0, -2.0, fill, np.nan], np.inf),
    ):
        pieces = [(FIRST, np.array(made[:2])), (SECOND, np.array(made[2:]))]
        assert difference('x', pieces, wanted).error == pytest.approx(error)
    found = difference('x', [(FIRST, np.array([1e-3, 0.0]))], np.array([0.0, 0.0, fill, fill]))
    assert found.error == pytest.approx(1e-3 / abs(fill))


def test_a_single_large_element_or_several_of_its_kind_are_the_scale():
    for wanted in ([1.0, -2.0, 1e9, 9e8], [0.0, 1e-4, 0.5, 1e4], [1.0, 1.0, 0.5, 0.0]):
        made = np.array(wanted) + np.array([0.1, 0, 0, 0])
        found = difference('x', [((slice(None),), made)], np.array(wanted))
        assert found.error == pytest.approx(0.1 / max(wanted))


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


def test_in_fp32_a_result_may_differ_as_much_as_last_bits_of_the_inputs_change_it():
    """A difference of almost equal numbers, or a direction that a matrix barely has."""
    wanted, steady, shaky = np.ones(4), np.ones(4) + 1e-9, np.array([1.0, 1.0, 1.001, 1.0])
    made = [((slice(None),), np.ones(4) + 4e-3)]
    assert difference_in_fp32('x', made, wanted, steady, floor=1e-5).limit == 1e-5
    limit = difference_in_fp32('x', made, wanted, shaky, floor=1e-5).limit
    assert limit == pytest.approx(MARGIN_IN_FP32 * 1e-3)
    compare = functools.partial(difference_in_fp32, 'x', made, wanted, steady, floor=1e-5)
    assert compare(recompiled=shaky).limit == pytest.approx(MARGIN * 1e-3)
    assert compare(recompiled=np.full(4, np.nan)).limit == 1e-5


def test_results_that_are_not_numbers_explain_no_error():
    wanted, made = np.ones(32), [((slice(None),), np.full(32, np.nan))]
    for broken in (np.full(32, np.inf), np.full(32, np.nan)):
        found = difference_in_fp32('x', made, wanted, broken, floor=1e-5)
        assert (found.error, found.limit) == (np.inf, 1e-5)
        in_16_bits = difference_of_rounded('x', made, broken, wanted, floor=1e-2)
        assert in_16_bits.limit is not None
        assert in_16_bits.limit <= 1e-2


def test_if_few_elements_have_the_error_its_norm_can_be_larger_by_chance():
    random = np.random.default_rng(0)
    precise = random.normal(size=64)
    alike, single = 2e-2 * random.normal(size=64), np.where(np.arange(64) < 2, 8e-2, 1e-4)
    for noise, factor in ((alike, 2), (single, np.exp(3 / np.sqrt(6)))):
        made = [((slice(None),), precise - factor * 1.05 * noise)]
        found = difference_of_rounded('x', made, precise + noise, precise, floor=10.0)
        assert found.limit is not None
        assert 1 < found.error / found.limit < 1.1
        more = [(precise + 2 * noise, precise)]
        found = difference_of_rounded('x', made, precise + noise, precise, floor=10.0, also=more)
        assert found.limit is not None
        assert found.error < 0.6 * found.limit


SHAPES = (64,), (2, 128), (64, 64)
NOISE = 1e-3, 1e-2, 2e-2, 4e-2


def rounded(shape: tuple[int, ...], noise: float, seed: int) -> tuple[np.ndarray, ...]:
    """An array, and two copies of it, each with random errors of this size on average."""
    random = np.random.default_rng(seed)
    precise = random.normal(size=shape)
    size = noise * np.sqrt(np.mean(precise**2))
    return precise, *(precise + size * random.normal(size=shape) for _ in range(2))


def is_right(made: np.ndarray, expected: np.ndarray, precise: np.ndarray) -> bool:
    whole = (slice(None),) * made.ndim
    found = difference_of_rounded('x', [(whole, made)], expected, precise, floor=LIMIT_16_BITS)
    assert found.limit is not None
    return found.error <= found.limit


@pytest.mark.parametrize(
    ('shape', 'noise'), [*((shape, 1e-2) for shape in SHAPES), *(((64, 64), x) for x in NOISE)]
)
def test_a_program_that_rounds_as_much_as_one_device_is_right(shape, noise):
    for seed in range(50):
        precise, expected, made = rounded(shape, noise, seed)
        assert is_right(made, expected, precise), seed


@pytest.mark.parametrize('noise', NOISE)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
def test_an_array_of_which_a_part_is_lost_is_wrong_however_much_rounding_explains(shape, noise):
    for seed in range(20):
        precise, expected, made = rounded(shape, noise, seed)
        lost = made.copy()
        lost[: len(lost) // 2] = 0
        assert not is_right(lost, expected, precise), seed
        assert not is_right(made / 2, expected, precise), seed


@pytest.mark.parametrize('noise', NOISE[:3])
def test_a_matrix_that_is_five_percent_too_large_is_wrong_beside_rounding_of_two(noise):
    for seed in range(20):
        precise, expected, made = rounded((64, 64), noise, seed)
        assert not is_right(1.05 * made, expected, precise), seed
