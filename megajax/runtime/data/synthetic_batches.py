"""Batches of synthetic images with a question, to be answered letter by letter."""

from collections.abc import Callable

import numpy as np

from megajax.runtime.data.batches import Batch, Batches
from megajax.runtime.data.image_rows import ImageDocument, RowShape
from megajax.runtime.data.synthetic_images import IMAGE, Picture
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.data.text.tokenizer import Tokenizer

ENDLESS = range(1 << 60)


class PictureBatches(Batches):
    """Sequences of one image each: image, question, answer and end of document.

    `draw(i)` draws image i; the batch of a step has images step B up to (step + 1) B, without end
    or up to `count`. The loss counts the answer and the token that ends it. `RowShape` lists the
    arrays. `unlike` are batches with the same answers, but with images unlike any in training.
    """

    def __init__(
        self,
        draw: Callable[[int], Picture],
        shape: RowShape,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        count: int | None = None,
        unlike: 'PictureBatches | None' = None,
    ):
        self.batch_size, self.draw, self.shape, self.unlike = batch_size, draw, shape, unlike
        self._tokenizer, self.order = tokenizer, ENDLESS if count is None else range(count)

    @property
    def pictures(self) -> list[Picture]:
        """The images of finite batches."""
        return [self.draw(i) for i in self.order]

    def document(self, picture: Picture) -> ImageDocument:
        """Return the tokens and patches of an image with question and answer."""
        patches, (height, width) = self.shape.patches, picture.image_HWC.shape[:2]
        grid = patches.fit(height, width)
        start, end = picture.question.split(IMAGE)
        pieces = [
            Piece(text=start),
            Piece(image=IMAGE),
            Piece(text=end),
            Piece(text=picture.answer, answered=True),
        ]
        ids, answered = self._tokenizer.encode_pieces(
            pieces, sizes=[patches.tokens(grid)], image_token=self.shape.image_token
        )
        eod = self._tokenizer.eod
        begin = self._tokenizer.start or [eod]
        return ImageDocument(
            tokens=np.array([*begin, *ids, eod], np.int32),
            answered=np.array([*[False] * len(begin), *answered, True]),
            grids=[grid],
            patches=[patches.cut(picture.image_HWC, grid)],
        )

    def _rows(self, places: range, count: int) -> Batch:
        batch = self.shape.empty(count)
        for row, index in enumerate(places):
            document = self.document(self.draw(index))
            self.shape.fill({name: x[row] for name, x in batch.items()}, [document])
        return batch
