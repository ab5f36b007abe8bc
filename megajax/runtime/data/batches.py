"""Make batches of samples.

A batch depends only on the config and on the samples before it. R stands for a range of the batch
dim B.
"""

import sys
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Self, SupportsInt

import numpy as np

from megajax.runtime.data.samples import Samples

Batch = dict[str, np.ndarray]
Order = Sequence[int] | np.ndarray  # sample numbers, in the order of reading

READ_AHEAD = 2  # number of batches to prefetch


class Batches:
    """The samples of `order`, B at a time: `batches[step]` is the batch of a step.

    After `going_on`, the batch of the given step begins with the first sample that was not read
    before.

    A batch contains `tokens` and `labels` (int32) and `loss_mask` (float32), each [B, S].
    `loss_mask` is 0 where there is no label: past the end of the tokens, and in sequences that pad
    the last batch.

    With `document_mask`, attention does not cross document boundaries: int32 `segment_ids` [B, S]
    number the documents of a sequence, int32 `positions` [B, S] restart in each document, and
    `loss_mask` is 0 where the label belongs to the next document.

    `len` is the number of steps; the order may be endless.
    """

    read_threads = 1  # number of threads that make batches ahead of their steps
    batch_size: int
    order: Order
    # Samples before batch 0; not 0 if earlier batches had a different size.
    shift = 0
    # With Megatron-LM's order: the number of samples that the order was made for, and its passes
    # through each dataset. Equal passes give equal orders.
    order_of: int | None = None
    passes: tuple[object, ...] = ()

    def __init__(
        self,
        samples: Samples,
        order: Order,
        *,
        seq_len: int,
        batch_size: int,
        document_mask: bool = False,
    ):
        self.batch_size, self.order = batch_size, order
        self._samples, self._seq_len, self._document_mask = samples, seq_len, document_mask

    def __len__(self) -> int:
        steps = max(-(-(len(self.order) - self.shift) // self.batch_size), 0)
        return min(steps, sys.maxsize)  # an endless order has as many samples

    @property
    def num_samples(self) -> int:
        """The number of different samples."""
        return len(self._samples)

    def counted(self, sample: int) -> np.ndarray:
        """Return the labels of a sample that count in the loss."""
        alone = copy(self)
        alone.order = [sample]
        row = alone._rows(range(1), 1)
        counted: np.ndarray = row['labels'][row['loss_mask'] > 0]
        return counted

    def going_on(self, step: int, samples: int) -> Self:
        """Return these batches, shifted so that `samples` samples precede the batch of `step`."""
        batches = copy(self)
        batches.shift = samples - step * self.batch_size
        return batches

    def place(self, step: SupportsInt) -> dict[str, Any]:
        """Return the position before the batch of `step`, as a checkpoint records it."""
        return {'samples': self.samples_before(int(step)), 'order_of': self.order_of}

    def samples_before(self, step: int) -> int:
        """Return the number of samples before the batch of `step`."""
        return step * self.batch_size + self.shift

    def __getitem__(self, step: int) -> Batch:
        return self.rows(step, 0, self.batch_size)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return sequences `start` to `stop` of the batch of `step`, and read no others."""
        return self._rows(self._places(step, start, stop), stop - start)

    def unreadable(self, count: int) -> Batch:
        """Return replacements for unreadable sequences; their NaN loss skips the update."""
        batch = self._rows(range(0), count)
        return {**batch, 'loss_mask': np.full_like(batch['loss_mask'], np.nan)}

    def _rows(self, places: range, count: int) -> Batch:
        """Return `count` sequences; the first ones are the samples at these indices."""
        window_RS = np.zeros((count, self._seq_len + 1), np.int32)
        loss_mask_RS = np.zeros((count, self._seq_len), np.float32)
        begins = []
        for row, index in enumerate(places):
            num_tokens, row_begins = self._samples.read(self.order[index], window_RS[row])
            loss_mask_RS[row, : max(num_tokens - 1, 0)] = 1
            begins += [(row, begin) for begin in row_begins]
        batch = {'tokens': window_RS[:, :-1], 'labels': window_RS[:, 1:], 'loss_mask': loss_mask_RS}
        return _separate(batch, begins) if self._document_mask else batch

    def _places(self, step: int, start: int, stop: int) -> range:
        first = self.samples_before(step)
        if first < 0 or step >= len(self):
            raise IndexError(f'step {step} of {len(self)}')
        return range(first + start, min(first + stop, len(self.order)))

    def read_ahead(self, first: int, last: int, rows: slice) -> Iterator[Batch]:
        """Yield these sequences of the batches of steps `first` up to `last`, prefetched in
        threads.
        """
        import grain

        steps = grain.MapDataset.range(first, last).map(
            lambda step: self.rows(int(step), rows.start, rows.stop)
        )
        options = grain.ReadOptions(
            num_threads=self.read_threads,
            prefetch_buffer_size=max(READ_AHEAD, self.read_threads),
        )
        return iter(steps.to_iter_dataset(options))


def _separate(batch: Batch, begins: Sequence[tuple[int, int]]) -> Batch:
    """Return the batch with `segment_ids` and `positions` that separate its documents.

    Each entry of `begins` is a sequence and the token in it at which a document begins.
    """
    loss_mask_RS = batch['loss_mask']
    starts_RS = np.zeros((len(loss_mask_RS), loss_mask_RS.shape[1] + 1), np.int32)
    for row, begin in begins:
        starts_RS[row, begin] = begin
        loss_mask_RS[row, begin - 1] = 0
    starts_RS = starts_RS[:, :-1]
    positions_RS = np.arange(starts_RS.shape[1], dtype=np.int32) - np.maximum.accumulate(
        starts_RS, axis=1
    )
    return {
        **batch,
        'segment_ids': np.cumsum(starts_RS > 0, axis=1, dtype=np.int32),
        'positions': positions_RS,
    }
