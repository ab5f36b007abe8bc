"""Prompts with images: their tokens, and the image arrays that the model gets with them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.core.config import Config, ConfigError
from megajax.core.model.images import Images
from megajax.runtime.data import Tokenizer
from megajax.runtime.data.image_rows import ImageDocument, RowShape
from megajax.runtime.data.image_text.documents import FileDocument, encode_prompt
from megajax.runtime.data.image_text.fit import check_pictures
from megajax.runtime.data.synthetic_corpus import row_shape


class PromptImages(NamedTuple):
    """The images of a prompt: arrays of `Images` without dim B, and positions [S] or [S, 3]."""

    pixels_IPX: np.ndarray
    grid_I2: np.ndarray
    index_S: np.ndarray
    position_S: np.ndarray


Prompt = tuple[list[int], PromptImages]


class PromptReader:
    """Reads prompts with images for a model.

    Raises ConfigError if the model is not a vision-language model.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer | None):
        if config.vision is None:
            raise ConfigError('this is a text-only model: give no images, or train with vision')
        if tokenizer is None:
            raise ConfigError('the model has no tokenizer, so it cannot read a prompt')
        self._tokenizer = tokenizer
        self._shape = dataclasses.replace(row_shape(config), seq_len=config.model.max_seq_len)

    def check(self, text: str, images: Sequence[Path]) -> FileDocument:
        """Return a prompt in which each `<image>` stands for the next of the files `images`.

        Only the headers of the files are read. Raises ConfigError if a file is not an image, if the
        number of files differs from the number of `<image>`, or if the prompt leaves no room in
        `model.max_seq_len`. With relevance and `vision.fusion=tokens`, a prompt must not end with
        an image.
        """
        document = encode_prompt(text, images, self._shape, self._tokenizer)
        check_pictures(dataclasses.replace(document, place='prompt'), self._shape)
        last = int(document.tokens[-1])
        if self._shape.patches.may_end_empty and last == self._shape.image_token:
            raise ConfigError(
                f'the prompt ends with {images[-1]}, whose last tokens relevance may leave empty: '
                'write text after <image>'
            )
        if (length := len(document.tokens)) >= self._shape.seq_len:
            names = ', '.join(map(str, images))
            raise ConfigError(
                f'{names}: the prompt has {length} tokens with its images, which leaves no room '
                f'in model.max_seq_len={self._shape.seq_len}: shorten it, or give fewer images'
            )
        return document

    def read(self, document: FileDocument) -> Prompt:
        """Read the images of a prompt; raises ConfigError for a damaged image."""
        return prompt_of(document.read(self._shape), self._shape, len(document.tokens))


def prompt_of(document: ImageDocument, shape: RowShape, length: int) -> Prompt:
    """Return the first `length` tokens of a document as a prompt."""
    row = {name: x[0] for name, x in shape.empty(1).items()}
    shape.fill(row, [document])
    positions = row.get('positions', np.arange(shape.seq_len, dtype=np.int32))
    return document.tokens[:length].tolist(), PromptImages(
        row['pixels'], row['image_grid'], row['image_index'][:length], positions[:length]
    )


def pad(images: PromptImages, length: int) -> PromptImages:
    """Return the images of a prompt that is padded with text tokens to this length."""
    added = length - len(images.index_S)
    positions = np.pad(images.position_S, ((0, added), *[(0, 0)] * (images.position_S.ndim - 1)))
    index_S = np.pad(images.index_S, (0, added), constant_values=-1)
    return images._replace(index_S=index_S, position_S=positions)


def stack(images: Sequence[PromptImages], size: int, length: int) -> tuple[Images, np.ndarray]:
    """Return the images of `size` prompts, and the positions of their last `length` tokens."""

    def rows(arrays: Sequence[np.ndarray], shape: tuple[int, ...], fill: int = 0) -> Any:
        filled = np.full((size, *shape), fill, arrays[0].dtype)
        for row, x in enumerate(arrays):
            filled[row, -len(x) :] = x
        return filled

    pixels, grids, indices, positions = zip(*images, strict=True)
    return Images(
        rows(pixels, pixels[0].shape),
        rows(grids, grids[0].shape),
        rows(indices, (length,), -1),
    ), rows(positions, (length, *positions[0].shape[1:]))
