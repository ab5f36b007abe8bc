"""Context shards have two chunks of a sequence each, and the same work."""

import numpy as np
import pytest

from megajax.core.parallel.zigzag import in_order, in_shards, position_at


@pytest.mark.parametrize('shards', [1, 2, 3, 8])
def test_each_position_has_one_place_and_every_shard_as_many_earlier_tokens(shards):
    length = 12 * shards
    positions = position_at(np.arange(length), length, shards)
    assert sorted(positions) == list(range(length))
    seen = (positions + 1).reshape(shards, -1).sum(1)  # tokens that causal attention sees
    assert len(set(seen)) == 1


def test_a_shard_has_a_chunk_from_the_start_and_one_from_the_end():
    assert list(position_at(np.arange(8), 8, 2)) == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize('shards', [2, 3])
def test_all_tokens_are_put_in_order_and_back(shards):
    length = 4 * shards
    positions = position_at(np.arange(length), length, shards)
    rows = np.stack([positions, positions + length])[..., None]
    ordered = np.arange(2 * length).reshape(2, length, 1)
    np.testing.assert_array_equal(in_order(rows, shards), ordered)
    np.testing.assert_array_equal(in_shards(ordered, shards), rows)
