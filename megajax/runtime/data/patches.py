"""Split images into the patches that an encoder reads, and place them among tokens.

`core/parallel/layout.py` defines the letters; X is 3 p p for a side of p pixels. A unit is m x m
patches, which are merged into one embedding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from megajax.base.errors import mistake

MAX_ASPECT = 200  # ratio of an image's sides, as in transformers' Qwen2VLImageProcessor

Grid = tuple[int, int]  # rows and columns of patches


@dataclass(frozen=True, kw_only=True)
class PatchSize:
    """The sides of patches and units, and limits on the number of patches per image."""

    patch_size: int  # pixels
    merge_size: int  # patches
    max_patches: int
    # Qwen3-VL enlarges images to at least 256 patches; its `size.shortest_edge` is that area in
    # pixels
    min_patches: int = 0
    # embeddings per image, if relevance distributes them over the units; 0: one for each unit
    budget: int = 0
    grid: Grid | None = None  # grid of every image, if relevance has regions of a fixed size
    # whether one token marks an image, whose embeddings are not in the sequence (cross-attention)
    marked: bool = False

    @property
    def unit(self) -> int:
        """The side of a unit in pixels."""
        return self.patch_size * self.merge_size

    @property
    def max_units(self) -> int:
        """The maximum number of units per image."""
        return self.max_patches // self.merge_size**2

    @property
    def max_vectors(self) -> int:
        """The maximum number of embeddings per image, the stride of slots in `image_index`."""
        return self.budget or self.max_units

    @property
    def may_end_empty(self) -> bool:
        """Whether the last tokens of an image may be empty, so that they see nothing."""
        return self.budget > 0 and not self.marked

    @property
    def _least_area(self) -> int:
        # Without a minimum, one unit: a side below half a unit would otherwise be rounded to 0.
        return (self.min_patches or self.merge_size**2) * self.patch_size**2

    def vectors(self, grid: Grid) -> int:
        """Return the number of embeddings of an image."""
        return self.budget or grid[0] * grid[1] // self.merge_size**2

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image in the sequence."""
        return 1 if self.marked else self.vectors(grid)

    def fit(self, height: int, width: int, *, name: str = 'picture', place: str = '') -> Grid:
        """Return the patch grid of an image of `height` x `width` pixels.

        As in transformers' `smart_resize` (Qwen2-VL and later), sides are rounded to whole units,
        and scaled together if the area is out of limits. If an image is so narrow that it still has
        more than `max_patches`, its long side is shortened. Raises ConfigError if one side is more
        than `MAX_ASPECT` times the other. If `grid` is fixed, it is returned.
        """
        if self.grid is not None:
            return self.grid
        if max(height, width) > MAX_ASPECT * min(height, width):
            message = (
                f'has {width} x {height} pixels, and one side may be at most {MAX_ASPECT} times '
                'the other; crop it'
            )
            raise mistake(name, message, place=place)
        unit, most, least = self.unit, self.max_patches * self.patch_size**2, self._least_area
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns > self.max_units:
            scale = math.sqrt(height * width / most)
            rows, columns = math.floor(height / scale / unit), math.floor(width / scale / unit)
        elif rows * columns * unit**2 < least:
            scale = math.sqrt(least / (height * width))
            rows, columns = math.ceil(height * scale / unit), math.ceil(width * scale / unit)
        rows, columns = max(rows, 1), max(columns, 1)
        shorter, longer = min(rows, columns), max(rows, columns)
        if shorter * longer > self.max_units:
            shorter = min(shorter, self.max_units)
            longer = self.max_units // shorter
        rows, columns = (shorter, longer) if rows < columns else (longer, shorter)
        return rows * self.merge_size, columns * self.merge_size

    def cut(self, image_HWC: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the patches of an image, uint8 [rows columns, X].

        An image of a different size is resized (bicubic). The patches of a unit are neighbors:
        patches are ordered [rows / m, columns / m, m, m], and the values in a patch are ordered
        [channel, y, x].
        """
        p, m, (rows, columns) = self.patch_size, self.merge_size, grid
        if image_HWC.shape[:2] != (rows * p, columns * p):
            image = Image.fromarray(image_HWC)
            size = columns * p, rows * p
            image_HWC = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
        cells = image_HWC.reshape(rows // m, m, p, columns // m, m, p, 3)
        return cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * p * p)


def place_images(
    tokens_S: np.ndarray,
    grids: Sequence[Grid],
    *,
    image_token: int,
    patches: PatchSize,
    first_slot: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the image embedding at each token of a document, and positions for M-RoPE.

    The placeholder tokens `image_token` of the document stand for the embeddings of `grids`, in
    order. Returns int32 `image_index` [S], -1 for text, else slot * max_vectors + index, and int32
    `positions` [S, 3] of time, row and column. Text has the same number in all three. The units of
    an image that begins at n have (n, n + row, n + column), and the text after the image continues
    at n + max(rows, columns) (Qwen2-VL, https://arxiv.org/abs/2409.12191). With a `budget`, the
    step decides which units the embeddings stand for, so all of them have (n, n, n) here. A token
    that marks an image (cross-attention) has the index of the image's first embedding, and counts
    as text.
    """
    place_N = np.flatnonzero(tokens_S == image_token)
    assert len(place_N) == sum(map(patches.tokens, grids)), (len(place_N), grids)
    image_index_S = np.full(len(tokens_S), -1, np.int32)
    position_S3 = np.repeat(np.arange(len(tokens_S), dtype=np.int32)[:, None], 3, axis=1)
    used = 0
    for slot, grid in enumerate(grids, first_slot):
        rows, columns = (side // patches.merge_size for side in grid)
        count = patches.tokens(grid)
        start = int(place_N[used])
        stop, used = start + count, used + count
        assert place_N[used - 1] == stop - 1, 'the tokens of an image are consecutive'
        image_index_S[start:stop] = slot * patches.max_vectors + np.arange(count)
        if patches.marked:
            continue
        position_S3[start:stop] = position_S3[start]
        if not patches.budget:
            position_S3[start:stop, 1] += np.repeat(np.arange(rows, dtype=np.int32), columns)
            position_S3[start:stop, 2] += np.tile(np.arange(columns, dtype=np.int32), rows)
        position_S3[stop:] -= count - max(rows, columns)
    return image_index_S, position_S3
