"""Make batches of random tokens and images, to execute a step."""

import numpy as np

from megajax.core.config import Config
from megajax.runtime.data.image_rows import ImageDocument, RowShape
from megajax.runtime.data.synthetic_corpus import row_shape


def make_batch(config: Config) -> dict[str, np.ndarray]:
    """Make a batch of random tokens, with more weighted tokens in later rows.

    The batch has all arrays that a step of the config reads.
    """
    random, rows, length = np.random.default_rng(0), config.train.batch_size, config.train.seq_len
    token = random.integers(config.model.vocab_size, size=(rows, length + 1))
    position = np.arange(length)[None].repeat(rows, 0)
    counts = random.random((rows, length)) < np.linspace(0.2, 1, rows)[:, None]
    batch = {'tokens': token[:, :-1], 'labels': token[:, 1:], 'loss_mask': counts}
    if config.data.document_mask:
        document = length // (np.arange(rows)[:, None] ** 2 + 2) + 1  # down to one token
        batch |= {'segment_ids': position // document, 'positions': position % document}
    if config.model.is_bert:
        padding = position >= length - np.arange(rows)[:, None]
        batch |= {'token_types': position > length // 2, 'segment_ids': padding}
        batch |= {'loss_mask': counts & ~padding, 'swapped': random.integers(2, size=(rows, 1))}
    if config.vision is not None:
        batch |= _with_images(config, token, counts, random)
    dtypes = {'loss_mask': np.float32, 'pixels': np.uint8}
    return {name: np.ascontiguousarray(x, dtypes.get(name, np.int32)) for name, x in batch.items()}


def _with_images(
    config: Config, token: np.ndarray, counts: np.ndarray, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Make rows of one document with images of several sizes; every fourth row has no image."""
    shape = row_shape(config)
    batch = shape.empty(len(token))
    for number in range(len(token)):
        row = {name: x[number] for name, x in batch.items()}
        document = _document(shape, 0 if number % 4 == 3 else shape.images, token[number], random)
        shape.fill(row, [document])
        row['loss_mask'] *= counts[number]
    return batch


def _document(
    shape: RowShape, images: int, token: np.ndarray, random: np.random.Generator
) -> ImageDocument:
    """Make a document of these tokens; images replace some of them."""
    patches, merge = shape.patches, shape.patches.merge_size
    text = np.where(token == shape.image_token, (shape.image_token + 1) % 2, token)
    if patches.grid is not None:  # each image has one token in front of it
        images = min(images, len(text) // (1 + patches.tokens(patches.grid)))
    units = min(patches.max_units, max(1, len(text) // (2 * max(1, images))))
    grids = [
        patches.grid or (merge, merge * int(random.integers(1, units + 1))) for _ in range(images)
    ]
    start = 1
    for grid in grids:
        stop = start + patches.tokens(grid)
        text[start:stop] = shape.image_token
        start = stop + 1
    return ImageDocument(
        tokens=text.astype(np.int32),
        answered=text != shape.image_token,
        grids=grids,
        patches=[
            _image(rows * columns, 3 * patches.patch_size**2, random) for rows, columns in grids
        ],
    )


def _image(patches: int, size: int, random: np.random.Generator) -> np.ndarray:
    """Draw noise that is faint in the first patch and strong in the last.

    The regions of a photograph differ. If all regions were alike, normalizing them over the image
    would leave little more than rounding error.
    """
    strength = np.linspace(0.1, 1, patches)[:, None]
    return (random.integers(256, size=(patches, size)) * strength).astype(np.uint8)
