"""Documents with images: text is tokenized at once, images are decoded for each batch."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from megajax.base.errors import mistake, problems_at
from megajax.base.render.units import count
from megajax.runtime.data.image_rows import ImageDocument, RowShape
from megajax.runtime.data.image_text.chat import Chat
from megajax.runtime.data.image_text.lines import pieces_of, pieces_of_text, unread_images
from megajax.runtime.data.image_text.turns import Vocabulary, short
from megajax.runtime.data.images import inside, read_image, read_size
from megajax.runtime.data.patches import Grid
from megajax.runtime.data.sources.objects import read_objects
from megajax.runtime.data.text.pieces import Piece
from megajax.runtime.data.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileDocument:
    """A document whose images are in files; `read` decodes them."""

    place: str  # file and line
    tokens: np.ndarray  # int32
    answered: np.ndarray  # bool, whether each token counts in the loss
    paths: Sequence[Path]
    grids: Sequence[Grid]

    def read(self, shape: RowShape) -> ImageDocument:
        """Decode the images; raise ConfigError with the place if one is broken."""
        patches = []
        for path, grid in zip(self.paths, self.grids, strict=True):
            image_HWC = read_image(path, place=self.place)
            height, width = image_HWC.shape[:2]
            if shape.patches.fit(height, width, name=str(path), place=self.place) != grid:
                message = 'has changed its size since the run began; keep or restore it'
                raise mistake(path, message, place=self.place)
            patches.append(shape.patches.cut(image_HWC, grid))
        return ImageDocument(
            tokens=self.tokens, answered=self.answered, grids=self.grids, patches=patches
        )


def read_documents(
    path: Path, shape: RowShape, tokenizer: Tokenizer, chat: Chat
) -> Iterator[FileDocument]:
    """Yield the documents of JSON lines or a Parquet file, with the sizes of their images.

    Image names are relative to the folder of the file. Raises ConfigError with file and line if a
    line breaks a rule, or if an image is missing or not an image. Call `check_fit` for all
    documents together.
    """
    vocabulary = _vocabulary(shape, tokenizer)
    unread, first = 0, ''
    places = []  # of documents with text directly after an image, whose first token does not count
    for place, line in read_objects(path):
        pieces = pieces_of(line, vocabulary, chat, place)
        if vocabulary.sees and (keys := unread_images(line)):
            unread += 1
            first = first or f'{place} under {short(", ".join(keys))}'
        if shape.patches.may_end_empty and _follows_image(pieces):
            places.append(place)
        paths = [
            inside(path.parent, piece.image, place=place)
            for piece in pieces
            if piece.image is not None
        ]
        grids = [
            shape.patches.fit(*read_size(file, place=place), name=str(file), place=place)
            for file in paths
        ]
        is_begun = chat.begins_texts and line.get('messages') is not None
        with problems_at(place):
            tokens, answered = _encode(pieces, grids, shape, tokenizer, is_begun=is_begun)
        yield FileDocument(place=place, tokens=tokens, answered=answered, paths=paths, grids=grids)
    if unread:
        logger.warning(
            'data.corpus: %s lines name images under a key that is not read, such as %s; the model '
            'sees only the text; to show it the images, list their files in "images"',
            *(f'{unread:,}', first),
        )
    if places:
        logger.warning(
            'data.corpus: in %s, such as %s, text directly follows an <image>; with '
            'relevance, its first token does not count in the loss; begin the text on a new line',
            *(count(len(places), 'document'), places[0]),
        )


def encode_prompt(
    prompt: str, images: Sequence[str | Path], shape: RowShape, tokenizer: Tokenizer
) -> FileDocument:
    """Return the beginning of a document: a text in which each <image> is the next of `images`.

    Raises ConfigError if the numbers of <image> and of `images` differ, or if a file does not have
    the header of an image.
    """
    line = {'text': prompt, 'images': [str(path) for path in images]}
    pieces = pieces_of_text(line, _vocabulary(shape, tokenizer), 'prompt')
    grids = [shape.patches.fit(*read_size(path), name=str(path)) for path in images]
    tokens, answered = _encode(pieces, grids, shape, tokenizer)
    return FileDocument(
        place='',
        tokens=tokens[:-1],
        answered=answered[:-1],
        paths=list(map(Path, images)),
        grids=grids,
    )


def _follows_image(pieces: Sequence[Piece]) -> bool:
    """Whether text that counts follows an image on the same line."""
    return any(
        piece.image is not None and after.answered and after.text[:1] not in ('', '\r', '\n')
        for piece, after in pairwise(pieces)
    )


def _vocabulary(shape: RowShape, tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(special=tokenizer.special_tokens(), image_token=shape.image_token)


def _encode(
    pieces: Sequence[Piece],
    grids: Sequence[Grid],
    shape: RowShape,
    tokenizer: Tokenizer,
    *,
    is_begun: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a document, from start to end, and whether each counts in the loss.

    The end counts if the token before it does. With `is_begun`, the pieces already contain the
    start of a document, as a chat template's output does. A token directly after an image does not
    count if the image's last token, which predicts it, may be empty.
    """
    ids, answered = tokenizer.encode_pieces(
        pieces, sizes=list(map(shape.patches.tokens, grids)), image_token=shape.image_token
    )
    begin = [] if is_begun and ids else tokenizer.start or [tokenizer.eod]
    if ids[: len(begin)] != begin:
        ids, answered = [*begin, *ids], [*[False] * len(begin), *answered]
    if ids[-1] != tokenizer.eod or len(ids) == len(begin):
        ids, answered = [*ids, tokenizer.eod], [*answered, pieces[-1].answered]
    tokens, counts = np.array(ids, np.int32), np.array(answered, bool)
    if shape.patches.may_end_empty:
        counts[1:] &= tokens[:-1] != shape.image_token
    return tokens, counts
