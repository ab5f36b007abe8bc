"""The masks of a context shard are parts of those that `jax.random` draws for whole sequences."""

import jax
import numpy as np
import pytest

from megajax.core.model.dropout import kept

RATE = 0.1


@pytest.mark.parametrize('shape', [(3, 5, 70000), (2, 7)])
def test_elements_are_kept_that_bernoulli_keeps_in_the_whole_array(shape: tuple[int, ...]) -> None:
    key, (*rows, width) = jax.random.key(3), shape
    row, column = np.arange(np.prod(rows))[::2], np.arange(width)[::-3]

    @jax.jit
    def both(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = kept(jax.random.key_data(key), row[:, None], column[None], width, RATE)
        return found, jax.random.bernoulli(key, 1 - RATE, shape)

    found, expected = map(np.asarray, both(row, column))
    np.testing.assert_array_equal(found, expected.reshape(-1, width)[::2, ::-3])


def test_rows_after_element_two_to_the_32_have_bits_of_their_own() -> None:
    key, width = jax.random.key_data(jax.random.key(0)), 1 << 20
    row, column = np.array([1, 1 + (1 << 12), 1 + (1 << 13)]), np.arange(4096)
    masks = jax.jit(lambda row, column: kept(key, row[:, None], column[None], width, 0.5))
    masks = np.asarray(masks(row, column))
    agree = [np.mean(masks[i] == masks[j]) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert agree == pytest.approx([0.5] * 3, abs=0.05)
