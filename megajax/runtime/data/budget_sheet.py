"""Draw the token budget of an image, the number of tokens of each region, on top of the image."""

from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from megajax.runtime.data.synthetic_images import LETTER_HEIGHT, LETTER_WIDTH

SIDE = 160  # minimum side of a region in pixels
_FEWEST, _MOST = (40, 60, 160), (255, 220, 60)  # colors of a region with 64 and with 400 tokens
_VEIL = 96  # opacity of a region's color, out of 255


def draw_budget(picture: Image.Image, tokens: np.ndarray) -> Image.Image:
    """Return an image with the number of tokens [rows, columns] of each region drawn on it.

    The more tokens a region has, the brighter its frame and overlay.
    """
    rows, columns = tokens.shape
    scale = max(1, -(-SIDE * rows // picture.height), -(-SIDE * columns // picture.width))
    size = picture.width * scale, picture.height * scale
    sheet = picture.convert('RGB').resize(size, Image.Resampling.NEAREST)
    veil = Image.new('RGBA', size)
    draw = ImageDraw.Draw(veil)
    font = ImageFont.load_default_imagefont()
    for (row, column), count in np.ndenumerate(tokens):
        box = (
            column * size[0] // columns,
            row * size[1] // rows,
            (column + 1) * size[0] // columns - 1,
            (row + 1) * size[1] // rows - 1,
        )
        share = (np.sqrt(count) - 8) / 12  # share of the way from 8 to 20 cells along a side
        color = tuple(
            round(low + share * (high - low)) for low, high in zip(_FEWEST, _MOST, strict=True)
        )
        draw.rectangle(box, fill=(*color, _VEIL), outline=(*color, 255), width=3)
        text = str(int(count))
        corner = box[2] - LETTER_WIDTH * len(text) - 5, box[3] - LETTER_HEIGHT - 5
        draw.rectangle((corner[0] - 2, corner[1] - 1, box[2] - 4, box[3] - 4), fill=(0, 0, 0, 255))
        draw.text(corner, text, fill=(255, 255, 255, 255), font=font)
    return Image.alpha_composite(sheet.convert('RGBA'), veil).convert('RGB')


def budget_png(picture: Image.Image, tokens: np.ndarray) -> bytes:
    """Return the image of `draw_budget` as a PNG."""
    file = BytesIO()
    draw_budget(picture, tokens).save(file, format='PNG')
    return file.getvalue()
