"""Each region of an image shows its number of tokens, and is brighter the more it has."""

import numpy as np
from PIL import Image

from megajax.runtime.data.budget_sheet import SIDE, draw_budget


def test_a_region_has_a_frame_and_a_veil_of_the_color_of_its_tokens():
    sheet = np.asarray(draw_budget(Image.new('RGB', (40, 20)), np.array([[64, 144], [256, 400]])))
    assert sheet.shape == (2 * SIDE, 4 * SIDE, 3)
    frames = [sheet[y, x] for y in (0, SIDE) for x in (0, 2 * SIDE)]
    veils = [sheet[y + 9, x + 9] for y in (0, SIDE) for x in (0, 2 * SIDE)]
    # 8, 12, 16 and 20 cells along a side: equal steps of color
    assert [frames[i].tolist() for i in (0, -1)] == [[40, 60, 160], [255, 220, 60]]
    np.testing.assert_allclose(np.diff(frames, axis=0, n=2, prepend=0)[2:], 0, atol=1)
    np.testing.assert_allclose(veils, np.array(frames) * (96 / 255), atol=1)


def test_the_number_stands_in_the_last_corner_of_its_own_region():
    # the same color
    one, other = (
        np.asarray(draw_budget(Image.new('RGB', (2 * SIDE, SIDE)), np.array([[64, count]])))
        for count in (399, 400)
    )
    y, x = np.nonzero((one != other).any(2))
    assert SIDE - 20 < y.min() <= y.max() < SIDE - 3
    assert 2 * SIDE - 30 < x.min() <= x.max() < 2 * SIDE - 3
