"""Windows hold each token but the first as a label once, and an order holds each sample of an epoch
once.
"""

from itertools import pairwise

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from megajax.runtime.data import stateless_order
from megajax.runtime.data.samples import Joined, Windows
from megajax.runtime.data.text.parts import Part, split_sequences
from megajax.runtime.data.tokens.indexed import from_lengths

S = 4


def make_windows(lengths: list[int], *, first_token: int = 0) -> Windows:
    sequences = from_lengths(
        'x',
        np.arange(first_token, first_token + sum(lengths), dtype=np.int32),
        np.array(lengths, np.int32),
    )
    return Windows(Part(sequences=sequences, first=0, last=len(lengths)), seq_len=S)


def read(samples: Windows | Joined, index: int) -> tuple[list[int], list[int]]:
    window = np.full(S + 1, -1, np.int32)
    found, begins = samples.read(index, window)
    return window[:found].tolist(), begins


@given(st.lists(st.integers(0, 9)))
def test_every_token_but_the_first_is_a_label_once(lengths: list[int]) -> None:
    windows = make_windows(lengths)
    labels = [label for i in range(len(windows)) for label in read(windows, i)[0][1:]]
    assert labels == list(range(1, sum(lengths)))


@given(st.lists(st.integers(0, 9)))
def test_a_window_knows_where_documents_begin_in_it(lengths: list[int]) -> None:
    windows = make_windows(lengths)
    starts = {
        int(start)
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False)
        if length
    }
    for i in range(len(windows)):
        tokens, begins = read(windows, i)
        assert begins == [at for at, token in enumerate(tokens) if at and token in starts]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
    st.sampled_from(['949,50,1', '1,1,1', '95,5,0', '1,0,0', '2,7,3.5']),
)
def test_a_split_cuts_sequences_in_three_and_loses_none(lengths: list[int], split: str) -> None:
    sequences = from_lengths(
        'x', np.arange(sum(lengths), dtype=np.int32), np.array(lengths, np.int32)
    )
    parts = split_sequences(sequences, split)
    assert [(a.last, b.first) for a, b in pairwise(parts)] == [(a.last, a.last) for a in parts[:2]]
    tokens = [sequences.tokens[part.start : part.stop] for part in parts]
    assert np.concatenate(tokens).tolist() == list(range(sum(lengths)))
    assert [int(part.lengths.sum()) for part in parts] == [part.num_tokens for part in parts]


def test_joined_datasets_are_numbered_through() -> None:
    a, empty, b = make_windows([9]), make_windows([0]), make_windows([3, 8], first_token=100)
    joined = Joined([a, empty, b])
    assert joined.starts == [0, 2, 2, 5]
    assert [read(joined, i) for i in range(5)] == [
        *(read(a, i) for i in range(2)),
        *(read(b, i) for i in range(3)),
    ]


@settings(max_examples=15)
@given(st.integers(1, 60), st.integers(0, 2**63), st.integers(0, 3))
def test_every_epoch_has_every_sample_once(count: int, seed: int, epoch: int) -> None:
    order = stateless_order.shuffled([0, count], [1.0], seed)
    assert sorted(order[epoch * count + i] for i in range(count)) == list(range(count))


def test_every_epoch_every_seed_and_every_dataset_has_an_order_of_its_own() -> None:
    def epoch(order, number):  # type: ignore[no-untyped-def]
        return tuple(int(order[number * 50 + i]) % 50 for i in range(50))

    orders = [stateless_order.shuffled([0, 50], [1.0], seed) for seed in range(4)]
    blend = stateless_order.shuffled([0, 50, 100], [1, 1], 0)
    halves = {
        d: tuple(int(blend[i]) % 50 for i in range(100) if blend[i] // 50 == d) for d in (0, 1)
    }
    found = [epoch(order, number) for order in orders for number in range(4)]
    assert len(set(found)) == len(found)  # also where seed + epoch is the same
    assert halves[0] != halves[1]


@pytest.mark.parametrize('weights', [slow([0.7, 0.3]), slow([1, 2]), [5, 0.01]])
def test_a_blend_has_its_weights_from_the_start_on(weights: list[float]) -> None:
    order = stateless_order.shuffled([0, 10, 17], weights, seed=1)
    is_first = [order[i] < 10 for i in range(300)]
    for length in (100, 300):
        share = sum(is_first[:length]) / length
        assert abs(share - weights[0] / sum(weights)) <= 2 / length


@pytest.mark.parametrize('weights', [[0.19, 0.81], [0.38, 0.62], [1, 2e-3]])
def test_a_blend_has_its_exact_weights(weights: list[float]) -> None:
    order = stateless_order.shuffled([0, 1000, 2000], weights, seed=1)
    share = sum(order[i] < 1000 for i in range(5000)) / 5000
    assert abs(share - weights[0] / sum(weights)) <= 1 / 5000


@pytest.mark.parametrize('weights', [[1, 2], [0.25, 0.5, 0.25], [1e-3, 1]])
def test_weights_that_grain_does_not_round_are_mixed_as_grain_mixes_them(
    weights: list[float],
) -> None:
    starts = [1000 * dataset for dataset in range(len(weights) + 1)]
    order = stateless_order.in_order(starts, weights)
    ranges = [grain.MapDataset.range(*bounds) for bounds in pairwise(starts)]
    mixed = grain.MapDataset.mix(ranges, weights)
    assert [order[i] for i in range(len(order))] == [mixed[i] for i in range(len(mixed))]
    assert stateless_order.repeated(weights, 10_000) == 0


@pytest.mark.parametrize('weights', [[0.19, 0.81], [1.495, 1], [3, 7, 8]])
def test_what_is_read_again_where_grain_rounded_the_weights_is_counted(
    weights: list[float],
) -> None:
    starts = [3000 * dataset for dataset in range(len(weights) + 1)]
    ranges = [grain.MapDataset.range(*bounds) for bounds in pairwise(starts)]
    mixed, order = grain.MapDataset.mix(ranges, weights), stateless_order.in_order(starts, weights)
    read, there = {int(mixed[i]) for i in range(3000)}, {int(order[i]) for i in range(3000)}
    assert stateless_order.repeated(weights, 3000) == len(read - there) > 0


def test_in_order_each_sample_comes_once_at_most() -> None:
    order = stateless_order.in_order([0, 10, 17, 17], [1.0, 1.0, 1.0])
    found = [order[i] for i in range(len(order))]
    assert len(set(found)) == len(found) == 14
    assert [i for i in found if i < 10] == list(range(7))
    assert list(stateless_order.in_order([0, 5], [1.0])) == list(range(5))
    assert len(stateless_order.in_order([0, 0], [1.0])) == 0
