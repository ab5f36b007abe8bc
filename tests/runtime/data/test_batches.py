"""The batch of a step depends on the config and the step alone, and no document sees another where
that is asked.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.runtime.data import Batch, Batches
from megajax.runtime.data.samples import Windows
from megajax.runtime.data.stateless_order import in_order, shuffled
from megajax.runtime.data.text.parts import Part
from megajax.runtime.data.tokens.indexed import from_lengths

S, B = 8, 4


def make_batches(
    lengths: list[int], *, seed: int | None = None, document_mask: bool = False
) -> Batches:
    tokens = np.arange(1, 1 + sum(lengths), dtype=np.uint16)
    part = Part(
        sequences=from_lengths('x', tokens, np.array(lengths, np.int32)), first=0, last=len(lengths)
    )
    windows = Windows(part, seq_len=S)
    starts = [0, len(windows)]
    order = in_order(starts, [1.0]) if seed is None else shuffled(starts, [1.0], seed)
    return Batches(windows, order, seq_len=S, batch_size=B, document_mask=document_mask)


def assert_equal(a: Batch, b: Batch) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize('seed', [None, 3])
def test_labels_are_the_tokens_that_follow(seed: int | None) -> None:
    batches = make_batches([1001], seed=seed)
    for step in range(31):
        batch = batches[step]
        assert {name: (x.shape, x.dtype.name) for name, x in batch.items()} == {
            'tokens': ((B, S), 'int32'),
            'labels': ((B, S), 'int32'),
            'loss_mask': ((B, S), 'float32'),
        }
        assert batch['loss_mask'].all()
        np.testing.assert_array_equal(batch['labels'], batch['tokens'] + 1)


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    straight, resumed = make_batches([1001], seed=3), make_batches([1001], seed=3)
    for step in range(40):
        straight[step]
    assert_equal(straight[40], resumed[40])
    assert not np.array_equal(resumed[40]['tokens'], make_batches([1001], seed=4)[40]['tokens'])


@pytest.mark.parametrize('document_mask', [False, True])
@pytest.mark.parametrize('seed', [None, 3])
def test_the_rows_of_processes_make_up_the_batch(seed: int | None, document_mask: bool) -> None:
    batches = make_batches([100] * 9 + [53], seed=seed, document_mask=document_mask)
    for step in (0, 29):
        parts = [batches.rows(step, start, stop) for start, stop in ((0, 1), (1, 4))]
        assert_equal(
            batches[step],
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
        )


def test_what_is_read_ahead_is_what_is_read() -> None:
    batches = make_batches([1001], seed=3)
    for step, batch in enumerate(batches.read_ahead(5, 9, slice(1, 3)), 5):
        assert_equal(batch, batches.rows(step, 1, 3))
    assert step == 8


@pytest.mark.parametrize('batch_size', [1, 2])
def test_batches_that_begin_again_are_endless_whatever_their_size(batch_size: int) -> None:
    batches = make_batches([1001], seed=3)
    batches.batch_size = batch_size
    again = batches.going_on(50, 0)
    assert len(again) > 10**18
    assert_equal(again[50], batches[0])


@pytest.mark.parametrize('length', [0, 1, 2, 8, 9, 10, 32, 33, 34, 41, 1001])
def test_in_order_every_label_counts_once(length: int) -> None:
    batches = make_batches([length])
    found = [batches[step] for step in range(len(batches))]
    labels = [
        label for batch in found for label in batch['labels'][batch['loss_mask'] == 1].tolist()
    ]
    assert labels == list(range(2, length + 1))
    assert all(batch['labels'].shape == (B, S) and batch['loss_mask'].any() for batch in found)
    with pytest.raises(IndexError):
        batches[len(batches)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_documents_are_apart(lengths: list[int]) -> None:
    batches = make_batches(lengths, document_mask=True)
    document = np.concatenate(
        [[-1], np.repeat(np.arange(len(lengths)), lengths), [-1]]
    )  # of token i, which is i
    start = np.concatenate([[0], np.repeat(1 + np.cumsum([0, *lengths[:-1]]), lengths), [0]])
    for step in range(len(batches)):
        batch = batches[step]
        for row in range(B):
            tokens, labels, mask = (batch[name][row] for name in ('tokens', 'labels', 'loss_mask'))
            real = tokens > 0
            owner = document[tokens[real]]
            same_segment = (
                batch['segment_ids'][row][real][:, None] == batch['segment_ids'][row][real][None]
            )
            np.testing.assert_array_equal(same_segment, owner[:, None] == owner[None])
            first = tokens[0] if real.any() else 0
            np.testing.assert_array_equal(
                batch['positions'][row][real], tokens[real] - np.maximum(start[tokens[real]], first)
            )
            inside = (labels > 0) & (document[labels] == document[tokens])
            np.testing.assert_array_equal(mask, inside.astype(np.float32))
