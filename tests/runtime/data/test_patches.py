"""Patches follow Qwen3-VL's order and sizes; tokens find the vectors and positions of pictures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megajax.core.config import ConfigError
from megajax.runtime.data.patches import PatchSize, place_images

QWEN3_VL = PatchSize(patch_size=16, merge_size=2, max_patches=65_536, min_patches=256)
IMAGE = 99


# computed with transformers' `smart_resize(height, width, 32, 65536, 16777216)`
@pytest.mark.parametrize(
    ('height', 'width', 'grid'),
    [
        (1024, 1024, (64, 64)),
        (480, 640, (30, 40)),
        (1080, 1920, (68, 120)),
        (100, 100, (16, 16)),
        (1, 1, (16, 16)),
        (20, 400, (4, 72)),
        (8000, 6000, (294, 220)),
        (4096, 4096, (256, 256)),
    ],
)
def test_sizes_are_those_of_qwen3_vl(height: int, width: int, grid: tuple[int, int]) -> None:
    assert QWEN3_VL.fit(height, width) == grid


# computed with transformers' `smart_resize(height, width, 32, least * 256, 16777216)`, where
# 0 is written as the 4 patches of a vector
@pytest.mark.parametrize(
    ('height', 'width', 'least', 'grid'),
    [
        (12, 290, 0, (2, 10)),
        (290, 12, 0, (10, 2)),
        (16, 33, 0, (2, 4)),
        (17, 290, 0, (2, 18)),
        (1, 1, 0, (2, 2)),
        (12, 290, 2, (2, 8)),
    ],
)
def test_a_strip_below_half_a_vector_is_that_of_qwen3_vl(
    height: int, width: int, least: int, grid: tuple[int, int]
) -> None:
    patches = PatchSize(patch_size=16, merge_size=2, max_patches=65_536, min_patches=least)
    assert patches.fit(height, width) == grid


@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    patch_size=st.integers(1, 16),
    merge_size=st.integers(1, 3),
    units=st.integers(1, 300),
    least=st.integers(0, 300),
)
def test_every_picture_fits_its_slot(
    height: int, width: int, patch_size: int, merge_size: int, units: int, least: int
) -> None:
    most = units * merge_size**2
    patches = PatchSize(
        patch_size=patch_size,
        merge_size=merge_size,
        max_patches=most,
        min_patches=min(least, most),
    )
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ConfigError, match='at most 200 times the other; crop it'):
            patches.fit(height, width)
        return
    rows, columns = patches.fit(height, width)
    assert rows % merge_size == columns % merge_size == 0
    assert 0 < rows * columns <= most


@given(st.integers(17, 4000), st.integers(17, 4000))
def test_within_the_limits_a_side_changes_by_half_a_unit_at_most(height: int, width: int) -> None:
    patches = PatchSize(patch_size=16, merge_size=2, max_patches=1 << 20)
    if max(height, width) <= 200 * min(height, width):
        rows, columns = patches.fit(height, width)
        assert abs(16 * rows - height) <= 16
        assert abs(16 * columns - width) <= 16


@given(st.integers(1, 12), st.integers(1, 12))
def test_a_picture_of_whole_units_keeps_its_size(rows: int, columns: int) -> None:
    patches = PatchSize(patch_size=6, merge_size=2, max_patches=4 * 144)
    assert patches.fit(12 * rows, 12 * columns) == (2 * rows, 2 * columns)


def test_patches_of_a_unit_are_neighbors_and_channels_come_first() -> None:
    patches = PatchSize(patch_size=3, merge_size=2, max_patches=24)
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (12, 18, 3), np.uint8)
    cut = patches.cut(image, (4, 6))
    assert cut.shape == (24, 27)
    assert cut.dtype == np.uint8
    place = 0
    for unit_row in range(2):
        for unit_column in range(3):
            for row in range(2):
                for column in range(2):
                    y, x = 3 * (2 * unit_row + row), 3 * (2 * unit_column + column)
                    patch = image[y : y + 3, x : x + 3].transpose(2, 0, 1)
                    np.testing.assert_array_equal(cut[place], patch.ravel())
                    place += 1


def test_another_size_is_resized_and_keeps_its_colors() -> None:
    patches = PatchSize(patch_size=4, merge_size=2, max_patches=64)
    image = np.full((3, 5, 3), (10, 120, 250), np.uint8)
    cut = patches.cut(image, (4, 6)).reshape(24, 3, 16)
    assert (cut == np.array([10, 120, 250])[None, :, None]).all()


def test_positions_are_those_of_the_paper() -> None:
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=24)
    tokens = np.array([5, 6, *[IMAGE] * 6, 7, *[IMAGE] * 2, 8, 9], np.int32)
    index, positions = place_images(
        tokens, [(4, 6), (4, 2)], image_token=IMAGE, patches=patches, first_slot=1
    )
    assert index.tolist() == [-1, -1, 6, 7, 8, 9, 10, 11, -1, 12, 13, -1, -1]
    first = [[2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]]
    second = [[6, 6, 6], [6, 7, 6]]
    text = [[i] * 3 for i in (0, 1, 5, 8, 9)]
    assert positions.tolist() == [*text[:2], *first, text[2], *second, *text[3:]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 4)), max_size=4))
def test_each_unit_has_one_token_and_text_counts_on(parts: list[tuple[int, int, int]]) -> None:
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=64)
    tokens, grids = [1], []
    for words, rows, columns in parts:
        tokens += [1] * words + [IMAGE] * (rows * columns)
        grids.append((2 * rows, 2 * columns))
    tokens.append(1)
    index, positions = place_images(
        np.array(tokens, np.int32), grids, image_token=IMAGE, patches=patches
    )
    used = [slot * 16 + unit for slot, (h, w) in enumerate(grids) for unit in range(h * w // 4)]
    assert index[index >= 0].tolist() == used
    assert ((index >= 0) == (np.array(tokens) == IMAGE)).all()
    text = positions[index < 0]
    assert (text == text[:, :1]).all()
    sides = sum(max(grid) // 2 for grid in grids)
    assert text[-1, 0] == len(tokens) - 1 - len(used) + sides


def test_tokens_and_pictures_must_match() -> None:
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=24)
    for tokens in ([IMAGE] * 3, [IMAGE, 1, IMAGE, IMAGE, IMAGE]):
        with pytest.raises(AssertionError):
            place_images(np.array(tokens), [(4, 4)], image_token=IMAGE, patches=patches)


def test_a_budget_gives_every_picture_as_many_vectors() -> None:
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=24, budget=3)
    tokens = np.array([1, *[IMAGE] * 3, 1, *[IMAGE] * 3, 1])
    index, positions = place_images(tokens, [(4, 6), (2, 2)], image_token=IMAGE, patches=patches)
    assert index.tolist() == [-1, 0, 1, 2, -1, 3, 4, 5, -1]
    assert positions.tolist() == [[i] * 3 for i in (0, 1, 1, 1, 4, 5, 5, 5, 6)]


def test_a_picture_that_is_marked_has_one_token_which_counts_as_text() -> None:
    patches = PatchSize(patch_size=2, merge_size=2, max_patches=24, marked=True)
    tokens = np.array([1, IMAGE, 1, IMAGE, 1])
    index, positions = place_images(tokens, [(4, 6), (2, 2)], image_token=IMAGE, patches=patches)
    assert index.tolist() == [-1, 0, -1, 6, -1]
    assert positions.tolist() == [[i] * 3 for i in range(5)]
