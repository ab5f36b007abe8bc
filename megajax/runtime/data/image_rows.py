"""Pack documents with images into sequences of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megajax.runtime.data.batches import Batch, Batches
from megajax.runtime.data.patches import Grid, PatchSize, place_images


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageDocument:
    """Tokens with one placeholder per unit of the images, and the images."""

    tokens: np.ndarray  # int32
    answered: np.ndarray  # bool, whether a token counts in the loss; an image's tokens never do
    grids: Sequence[Grid]
    patches: Sequence[np.ndarray]  # uint8 [rows * columns, X] for each image


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The static shape of sequences with images, and their arrays in addition to `pixels`.

    Sequences without image slots, for a text-only model, have no image arrays.
    """

    seq_len: int  # tokens
    images: int  # number of image slots
    patches: PatchSize
    image_token: int
    mrope: bool  # whether positions have three axes
    document_mask: bool = False
    limited_by: str = 'train.seq_len'  # the key of the config that limits `seq_len`
    max_seq_len: int = 0  # maximum number of tokens that the model reads
    multiple: int = 1  # `seq_len` is a multiple of this

    def longer(self, seq_len: int) -> str:
        """Return config keys with values that allow sequences of `seq_len` tokens."""
        fits = -(-seq_len // self.multiple) * self.multiple
        is_of_model = fits > self.max_seq_len and self.limited_by != 'model.max_seq_len'
        return f'{self.limited_by}={fits}' + f' model.max_seq_len={fits}' * is_of_model

    def empty(self, count: int) -> Batch:
        """Return sequences without documents."""
        S = self.seq_len
        batch: Batch = {name: np.zeros((count, S), np.int32) for name in ('tokens', 'labels')}
        batch |= {'loss_mask': np.zeros((count, S), np.float32), **self.no_pictures(count)}
        if self.document_mask:
            batch['segment_ids'] = np.zeros((count, S), np.int32)
        if self.mrope:
            batch['positions'] = np.zeros((count, S, 3), np.int32)
        elif self.document_mask:
            batch['positions'] = np.zeros((count, S), np.int32)
        return batch

    def no_pictures(self, count: int) -> Batch:
        """Return the image arrays of sequences without images."""
        if not self.images:
            return {}
        shape = count, self.images, self.patches.max_patches, 3 * self.patches.patch_size**2
        return {
            'pixels': np.zeros(shape, np.uint8),
            'image_grid': np.zeros((count, self.images, 2), np.int32),
            'image_index': np.full((count, self.seq_len), -1, np.int32),
        }

    def fill(self, row: Batch, documents: Sequence[ImageDocument]) -> None:
        """Fill an empty sequence with whole documents, which must fit (S + 1 tokens and I slots).

        The first token of each document is not a label, because the text before it does not predict
        it. With `document_mask`, attention and positions restart in each document.
        """
        S = self.seq_len
        window, answered = np.zeros(S + 1, np.int32), np.zeros(S + 1, bool)
        index_S, position_S3 = np.full(S + 1, -1, np.int32), np.zeros((S + 1, 3), np.int32)
        segment_S = np.full(S + 1, max(len(documents) - 1, 0), np.int32)
        start = slot = position = 0
        for number, document in enumerate(documents):
            stop = start + len(document.tokens)
            assert stop <= S + 1, f'{stop} tokens in a row of {S + 1}'
            window[start:stop], answered[start:stop] = document.tokens, document.answered
            answered[start] = False
            index_S[start:stop], position_S3[start:stop] = place_images(
                document.tokens,
                document.grids,
                image_token=self.image_token,
                patches=self.patches,
                first_slot=slot,
            )
            if not self.mrope:  # each token of an image has its own position
                position_S3[start:stop] = np.arange(stop - start)[:, None]
            position_S3[start:stop] += position
            segment_S[start:stop] = number
            for patches, grid in zip(document.patches, document.grids, strict=True):
                row['pixels'][slot, : len(patches)] = patches
                row['image_grid'][slot] = grid
                slot += 1
            start = stop
            position = 0 if self.document_mask else int(position_S3[:stop].max(initial=-1)) + 1
        padding = np.arange(S + 1 - start, dtype=np.int32)
        position_S3[start:] = position + padding[:, None]
        row['tokens'][:], row['labels'][:] = window[:-1], window[1:]
        row['loss_mask'][:] = answered[1:]
        if self.images:
            row['image_index'][:] = index_S[:-1]
        if self.document_mask:
            row['segment_ids'][:] = segment_S[:-1]
        if 'positions' in row:
            row['positions'][:] = position_S3[:-1] if self.mrope else position_S3[:-1, 0]

    def with_empty_slots(self, text: Batch) -> Batch:
        """Return a batch of text alone in the form that a vision-language model reads."""
        batch = text | self.no_pictures(len(text['tokens']))
        if self.mrope:  # all three numbers of a text token are equal
            ones_RS = np.ones_like(batch['tokens'])
            position_RS = batch.get('positions', np.cumsum(ones_RS, axis=1, dtype=np.int32) - 1)
            batch['positions'] = np.repeat(position_RS[..., None], 3, axis=2)
        return batch


class EmptySlots(Batches):
    """Text-only batches in the form that a vision-language model reads."""

    def __init__(self, text: Batches, shape: RowShape):
        self.batch_size, self.order = text.batch_size, text.order
        self.shape, self._text = shape, text
        self.order_of, self.passes = text.order_of, text.passes
        self.read_threads = text.read_threads

    @property
    def num_samples(self) -> int:
        """The number of different samples."""
        return self._text.num_samples

    def counted(self, sample: int) -> np.ndarray:
        """Return the labels of a sample that count in the loss."""
        return self._text.counted(sample)

    def _rows(self, places: range, count: int) -> Batch:
        return self.shape.with_empty_slots(self._text._rows(places, count))
